"""``python -m verl_tool.doctor.gpu_smoke``; see `smoke_cli`."""

import os

from verl_tool.doctor.gpu_smoke.smoke_cli import command
from verl_tool.util.command_line import run_command

if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    run_command(command)
