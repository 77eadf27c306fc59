"""How a finished trajectory is scored. One file a reward manager."""
