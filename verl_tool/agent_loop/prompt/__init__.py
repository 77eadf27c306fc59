"""What the model is told before its first turn."""
