"""Running the actions of one replica: its tools, its trajectories, and what it admits at a time."""
