"""Continue stored trajectories from a turn, with a model and the rebuilt state of the tools."""
