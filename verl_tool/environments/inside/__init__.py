"""Programs that run in the Python of another package; each needs the standard library and that package alone."""
