"""``python -m verl_tool.trajectories``."""

from verl_tool.trajectories.command import main

if __name__ == "__main__":
    main()
