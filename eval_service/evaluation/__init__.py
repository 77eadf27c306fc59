"""Runs a data set through an endpoint, scores the answers, and says how sure the figures are."""
