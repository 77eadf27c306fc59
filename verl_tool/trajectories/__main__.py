"""``python -m verl_tool.trajectories``."""

from verl_tool.trajectories.trajectories_cli import app

if __name__ == "__main__":
    app()
