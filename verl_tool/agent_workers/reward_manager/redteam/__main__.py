"""``python -m verl_tool.agent_workers.reward_manager.redteam``; see `redteam.command`."""

import typer

from verl_tool.agent_workers.reward_manager.redteam.redteam_cli import main

if __name__ == "__main__":  # the child processes import this module under another name
    typer.run(main)
