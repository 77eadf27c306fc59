"""Tools that are written as typed Python functions."""
