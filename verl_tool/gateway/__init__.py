"""Sessions of agents that call a model's API: what they sample, token for token."""
