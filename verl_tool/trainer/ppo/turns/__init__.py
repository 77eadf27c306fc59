"""Advantages of single turns: inputs of estimators, the estimator `mt_grpo`, and metrics."""
