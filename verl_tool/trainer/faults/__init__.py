"""When failing trajectories, calls or rewards end a run."""
