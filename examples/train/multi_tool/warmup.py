"""A tiny model that has just begun to use four tools, for questions of `tool_world.py`.

    python examples/train/multi_tool/warmup.py --data data/multi_tool --output outputs/model --tool_config tools.json

It learns from trajectories with what the real tools answer. Which tool they ask is drawn almost at random: the model
learns how to ask each, about whatever the question names, and to give what it answered. Learning stops as soon as a
call of the right tool is carried through with the wanted probability; which tool is the right one is left to
reinforcement learning.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from from_scratch import END, WarmUp, make_model, make_tokenizer, warm_up
from tiny_model import CHAT_TEMPLATE, Lesson, encode_lesson, learned, measured, texts_of
from tool_world import NUMBERS, TOOLS, call
from traces import Part, Trace

from verl_tool.errors import VerlToolError
from verl_tool.protocol import TURNS_LEFT_FIELD
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

HABIT = (0.3, 0.4, 0.15, 0.15)
"""How often the examples ask the right tool, the next one of `TOOLS`, and so on: a model that tells the questions
apart, and mostly draws the wrong conclusion."""
MEASURED_ROWS = 128
DEVIATION = 0.05
"""Of the weights at the start: with the usual 0.02 so small a model takes several times as long until it copies."""
AT_ONCE = 64
"""Calls of the tools."""
TURNS_LEFT = 1
"""What the loop tells the tools at the only call."""
NUMBER = re.compile(r"(?:^|\s)(\d+)\s*<")
"""The last thing that an observation shows, but for a reminder."""
TOWN = re.compile(r"lives in (\w+)")
Rows = Sequence[Mapping[str, Any]]


def drawn(right: str, rng: random.Random) -> str:
    """The tool that an example asks where `right` is the right one."""
    first = TOOLS.index(right)
    return rng.choices([*TOOLS[first:], *TOOLS[:first]], HABIT)[0]


def answer_to(observation: str) -> str:
    """What is made of an observation: its town or its number, or 0 if it has neither."""
    town, number = TOWN.search(observation), NUMBER.search(observation)
    if town is not None:
        return f"<answer> {town[1]}</answer>{END}"
    return f"\\boxed{{{number[1] if number else 0}}}{END}"


async def played(row: Mapping[str, Any], tool: str, tools: InProcessTools, trajectory_id: str) -> Trace:
    """The trajectory in which this tool is asked. Raises VerlToolError if it fails."""
    action = call(tool, row["extra_info"]["thing"])
    extra = {**row["extra_info"]["tools_kwargs"], TURNS_LEFT_FIELD: TURNS_LEFT}
    result = await tools.call(trajectory_id, action, step=0, extra=extra, is_last_step=True)
    if result.fault is not None:
        raise VerlToolError(f"{action}: {result.fault.message}")
    opening = f"<{tool}"
    return [
        Part(opening, True, free=True),
        Part(action.removeprefix(opening), True),
        Part(result.observation, False),
        Part(answer_to(result.observation), True),
    ]


async def lessons(rows: Rows, tools: Sequence[str], loaded: InProcessTools) -> list[Lesson]:
    """A trajectory of each row, in which that tool is asked."""
    traces: list[Trace] = []
    for start in range(0, len(rows), AT_ONCE):
        part = range(start, min(start + AT_ONCE, len(rows)))
        traces += await asyncio.gather(*(played(rows[i], tools[i], loaded, f"row-{i}-{tools[i]}") for i in part))
    return [
        Lesson([dict(message) for message in row["prompt"]], [trace]) for row, trace in zip(rows, traces, strict=True)
    ]


async def made(rows: Rows, config: ToolConfig, seed: int) -> list[Lesson]:
    """Of each row one; in the first `MEASURED_ROWS` the right tool is asked."""
    rng = random.Random(seed)
    right = [row["ability"] for row in rows]
    asked = [*right[:MEASURED_ROWS], *(drawn(tool, rng) for tool in right[MEASURED_ROWS:])]
    async with InProcessTools(load_tools("calculator,python_code,search_retrieval,sql", config)) as loaded:
        return await lessons(rows, asked, loaded)


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    tool_config: Annotated[str, typer.Option("--tool_config", help="Options of the tools, as for the tool server.")],
    target: Annotated[float, typer.Option("--target", min=0.0, max=1.0, help="Stop at this success, sampled.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if it does not reach `target`."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    found = asyncio.run(made(rows, ToolConfig.from_cli(tool_config), seed))
    tokenizer = make_tokenizer(texts_of(found), 900, CHAT_TEMPLATE)
    tokenizer.add_tokens([*map(str, NUMBERS)])
    examples = [each for lesson in found[MEASURED_ROWS:] for each in encode_lesson(tokenizer, lesson, learned)]
    held = [each for lesson in found[:MEASURED_ROWS] for each in encode_lesson(tokenizer, lesson, measured)]
    model = make_model(tokenizer, hidden=128, layers=2, seed=seed, deviation=DEVIATION)
    warm_up(model, tokenizer, examples, held, WarmUp(target, max_steps=800, learning_rate=5e-3, seed=seed), output)


if __name__ == "__main__":
    typer.run(main)
