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

from verl_tool.protocol import StepResult
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools

FILE = Path(__file__).with_name("NAME.py")


def answer_to(action: str) -> StepResult:
    """What a tool server answers to a model's text."""

    async def step() -> StepResult:
        async with InProcessTools(load_tools(str(FILE)), call_seconds=30) as tools:
            return await tools.call("trajectory", action, step=0)

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

_TOOL_WITH_STATE = '''\
from typing import Annotated

from pydantic import Field

from verl_tool.servers.tools import CallError, Context, TrajectoryTools, tool


class CLASS(TrajectoryTools):
    """One instance a trajectory; its methods with @tool share it."""

    async def setup(self, trajectory: Context) -> None:
        # What the row has in extra_info.tools_kwargs. In parquet a value with varying keys is best a JSON text.
        self.left: int = trajectory.extra.get("left", 3)

    async def teardown(self) -> None:
        """Close what `setup` opened."""

    @tool
    async def NAME(self, count: Annotated[int, Field(ge=1)] = 1) -> str:
        """Takes some, and says how many are left.

        Args:
            count: How many to take.
        """
        if count > self.left:
            raise CallError(f"there are only {self.left}")
        self.left -= count
        return f"{self.left} left"
'''
_TEST_WITH_STATE = '''\
import asyncio
from pathlib import Path

from verl_tool.protocol import StepResult
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools

FILE = Path(__file__).with_name("NAME.py")
TAKE = \'{"name": "NAME", "arguments": {"count": 2}}\'


def answers_to(*actions: str, left: int) -> list[StepResult]:
    """What a tool server answers to the turns of one trajectory, whose row has tools_kwargs {"left": left}."""

    async def steps() -> list[StepResult]:
        async with InProcessTools(load_tools(str(FILE))) as tools:
            return [await tools.call("a", action, step=i, extra={"left": left}) for i, action in enumerate(actions)]

    return asyncio.run(steps())


def test_the_state_goes_on_from_call_to_call() -> None:
    first, second, third = answers_to(TAKE, TAKE, TAKE, left=5)
    assert [result.fault for result in (first, second, third)] == [None] * 3
    assert "3 left" in first.observation
    assert "1 left" in second.observation
    assert "Error: there are only 1" in third.observation


def test_another_trajectory_has_a_state_of_its_own() -> None:
    assert "0 left" in answers_to(TAKE, left=2)[0].observation
'''

app = typer.Typer(add_completion=False)


@app.command()
def write(
    name: Annotated[str, typer.Argument(help="Name of the tool, and of its file.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where to write the two files.")] = Path("."),
    state: Annotated[
        bool, typer.Option("--state", help="A tool that keeps something for each trajectory (TrajectoryTools).")
    ] = False,
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
    of_tool, of_test = (_TOOL_WITH_STATE, _TEST_WITH_STATE) if state else (_TOOL, _TEST)
    in_camel_case = "".join(part.capitalize() for part in name.split("_")) or name
    tool.write_text(of_tool.replace("CLASS", f"{in_camel_case}Tools").replace("NAME", name), encoding="utf-8")
    test.write_text(of_test.replace("NAME", name), encoding="utf-8")
    typer.echo(
        f"{tool}: the tool\n{test}: its test\n"
        f"test it:  python -m pytest {test}\n"
        f"serve it: python -m verl_tool.servers.ray_serve --embedded --tool_type {tool}"
    )


if __name__ == "__main__":
    app()
