"""Generate tokens with verl's rollout engine or a transformers model."""
