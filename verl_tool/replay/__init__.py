"""What a run left behind, done again: its trajectories scored, and their calls run."""
