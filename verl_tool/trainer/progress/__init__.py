"""Where a training stands, and how that is shown."""
