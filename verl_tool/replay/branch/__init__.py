"""Time travel: from a turn of a stored trajectory on, with a model and the tools' state of then."""
