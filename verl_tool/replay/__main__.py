"""``python -m verl_tool.replay``."""

from verl_tool.replay.replay_cli import command
from verl_tool.util.command_line import run_command

if __name__ == "__main__":
    run_command(command)
