"""The loop inside verl."""
