"""Training with verl's trainers."""
