"""What runs in an agent's sandbox."""
