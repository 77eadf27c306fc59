"""What produces tokens: verl's rollout engine, or a transformers model."""
