"""The outputs of commands in assets/docs/doctor.md. Run as a script, this writes them again."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from template_models import WEATHER, save_model  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from verl_tool.doctor.doctor_cli import app  # noqa: E402

PAGE = ROOT / "assets" / "docs" / "doctor.md"
WIDTH = "110"
_BLOCK = re.compile(r"```text\n\$ python -m verl_tool\.doctor (?P<arguments>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
_FAMILIES = {"Qwen3-0.6B": "qwen3", "Llama-3.1-8B-Instruct": "llama3", "Mistral-7B-Instruct-v0.3": "mistral"}


def page_with_outputs(folder: Path) -> str:
    """Return the page with the current outputs of its commands. Models and the tool are made in `folder`."""
    for name, family in _FAMILIES.items():
        save_model(folder / name, family)
    (folder / "weather.py").write_text(WEATHER)

    def block(match: re.Match[str]) -> str:
        arguments = match["arguments"]
        output = said([str(folder / each) if (folder / each).exists() else each for each in shlex.split(arguments)])
        return f"```text\n$ python -m verl_tool.doctor {arguments}\n{output}```"

    return _BLOCK.sub(block, PAGE.read_text(encoding="utf-8"))


def said(arguments: list[str]) -> str:
    """Return the command's output without blanks at the ends of lines."""
    output = CliRunner(env={"COLUMNS": WIDTH}).invoke(app, arguments).output
    return "".join(f"{line.rstrip()}\n" for line in output.rstrip().splitlines())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(page_with_outputs(Path(made)), encoding="utf-8")
