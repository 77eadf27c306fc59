"""``python -m verl_tool.servers.tools.new NAME`` writes a typed tool that serves, and its test."""

from __future__ import annotations

import builtins
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from verl_tool.servers.tools.typed.function_tool import is_tool_name

_TOOL = '''\
from typing import Annotated

from pydantic import Field

from verl_tool.servers.tools import CallError, tool


@tool
async def NAME(text: str, times: Annotated[int, Field(ge=1, le=100)] = 1) -> str:
    """Reverses a text.

    Args:
        text: The text.
        times: How often to repeat what comes out.
    """
    if not text:
        raise CallError("there is no text")
    return text[::-1] * times
'''
_TEST = '''\
import asyncio
from pathlib import Path

import pytest

from verl_tool.protocol import StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools

FILE = Path(__file__).with_name("NAME.py")


def answer_to(action: str) -> StepResult:
    """What a tool server answers to a model's text."""

    async def step() -> StepResult:
        tools = ToolSet(load_tools(str(FILE)))
        await tools.start()
        try:
            [result] = await tools.step([StepRequest("trajectory", action, 0)], timeout_seconds=30)
            return result
        finally:
            await tools.close()

    return asyncio.run(step())


@pytest.mark.parametrize(
    "action",
    [
        "<NAME>abc</NAME>",
        '<tool_call>{"name": "NAME", "arguments": {"text": "abc"}}</tool_call>',
        '{"name": "NAME", "arguments": {"text": "abc", "times": "1"}}',
    ],
)
def test_a_call_is_answered_in_every_format(action: str) -> None:
    result = answer_to(action)
    assert (result.valid, result.fault) == (True, None)
    assert "cba" in result.observation


def test_the_model_is_told_what_is_wrong() -> None:
    result = answer_to('{"name": "NAME", "arguments": {"txt": "abc", "times": 0}}')
    assert (result.valid, result.fault) == (False, None)
    for words in ("text: Field required", "txt: there is no such argument", "times: Input should be greater than"):
        assert words in result.observation
    assert "Error: there is no text" in answer_to("<NAME></NAME>").observation
'''

app = typer.Typer(add_completion=False)


@app.command()
def write(
    name: Annotated[str, typer.Argument(help="Name of the tool, and of its file.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where to write the two files.")] = Path("."),
) -> None:
    """Write NAME.py, a tool that serves as it is, and test_NAME.py, its test, for you to change."""
    if not (is_tool_name(name) and name.isidentifier()) or iskeyword(name) or hasattr(builtins, name):
        raise typer.BadParameter(
            f"{name!r} cannot name a tool's function; use letters, digits and '_', such as my_tool"
        )
    tool, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (tool, test):
        if path.exists():
            raise typer.BadParameter(f"{path} is there already; choose another name, or move it")
    folder.mkdir(parents=True, exist_ok=True)
    tool.write_text(_TOOL.replace("NAME", name), encoding="utf-8")
    test.write_text(_TEST.replace("NAME", name), encoding="utf-8")
    typer.echo(
        f"{tool}: the tool\n{test}: its test\n"
        f"test it:  python -m pytest {test}\n"
        f"serve it: python -m verl_tool.servers.ray_serve --embedded --tool_type {tool}"
    )


if __name__ == "__main__":
    app()
