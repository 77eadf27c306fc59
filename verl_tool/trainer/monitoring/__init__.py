"""What watches a training, and ends it if it cannot go on."""
