"""What runs within the sandbox."""
