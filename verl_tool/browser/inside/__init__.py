"""Code that runs where chromium runs: standard library only."""
