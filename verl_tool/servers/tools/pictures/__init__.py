"""What the tools that show images share."""
