"""Advantages of single turns: what estimators are told of turns, the estimator `mt_grpo`, and metrics."""
