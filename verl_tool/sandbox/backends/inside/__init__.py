"""Code that runs in a container: standard library only, no import of this project."""
