"""Sampling that does not wait for the update, and updates that do not wait for it."""
