"""``python -m verl_tool.viewer``."""

from verl_tool.util.command_line import run_command
from verl_tool.viewer.viewer_cli import command

if __name__ == "__main__":
    run_command(command)
