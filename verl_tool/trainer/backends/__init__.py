"""Training and rollout engines: what a config may ask of them."""
