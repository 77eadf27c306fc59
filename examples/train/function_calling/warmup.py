"""A tiny model that has just begun to call functions, for questions of `examples/data_preprocess/function_calling.py`.

    python examples/train/function_calling/warmup.py --data data/function_calling --output outputs/model

It learns from trajectories that the agent loop itself made, with the real tools, so that prompts, calls and answers
stand there token for token as in a training. Which tool they call is drawn almost at random: the model learns how to
call each, to fill in what the question names, and to give what the tool answered. Learning stops as soon as a call of
the right tool is carried through with the wanted probability; which tool is the right one is left to reinforcement
learning.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import IGNORED, Row, WarmUp, make_model, make_tokenizer, warm_up
from trajectory_lessons import ScriptedModel, common_lines, to_lessons

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.observation import TRUNCATION_MARK
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.formats import HERMES
from verl_tool.protocol import ToolDescription
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
"""Renders what Qwen2.5's does, but for the system message that that one makes up."""
OPTIONS = EpisodeOptions(enable_mtrl=True, mtrl_role="tool", formats=("hermes",), max_turns=1, max_obs_length=16)
"""The loop's in `cpu.yaml`, as far as it matters here."""
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""One token each, as in Qwen3's tokenizer."""
PIECES = ('{"name": "', '", "arguments": {"', TRUNCATION_MARK, *map(str, range(10, 100)))
"""More that is one token: what each call has in common, and numbers of two digits."""
HABIT = (0.3, 0.4, 0.15, 0.15)
"""How often the examples call the right tool, the one listed behind it, and so on: a model that tells the questions
apart, and mostly draws the wrong conclusion."""
VOCABULARY = 640
"""Most tokens, but for those of lines."""
MEASURED_ROWS = 256
NUMBER = re.compile(r"-?\d+(\.\d+)?")


def call_of(row: Mapping[str, Any], tool: ToolDescription) -> str:
    """A call of `tool` with the arguments of the row's question, whichever tool that is for."""
    given = json.loads(row["extra_info"]["arguments"]).values()
    return HERMES.write_call(tool.name, dict(zip(tool.parameters["properties"], given, strict=True)))


def answer_to(observation: str) -> str:
    """The turn behind an observation: its number, or that there is none."""
    return f"\\boxed{{{observation if NUMBER.fullmatch(observation) else '?'}}}"


class Player:
    """Makes trajectories with the loop of the training."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: InProcessTools) -> None:
        self.tokenizer = HFTokenizer(tokenizer)
        self.tools = tools.describe()
        self.prompts = PromptRenderer(self.tokenizer, OPTIONS, self.tools)
        self._calls: dict[str, str] = {}
        """Calls that are not written yet, by the trajectory's id."""
        self._episode = Episode(ScriptedModel(self.tokenizer, self._write), tools, self.tokenizer, OPTIONS)

    async def play(self, row: Mapping[str, Any], tool: ToolDescription, trajectory_id: str) -> Trajectory:
        """The trajectory in which `tool` is called."""
        self._calls[trajectory_id] = call_of(row, tool)
        prompt = self.prompts.ids([dict(message) for message in row["prompt"]], None, trajectory_id)
        return await self._episode.run(prompt, trajectory_id=trajectory_id)

    def _write(self, context: str, trajectory_id: str) -> str:
        """The call, and then what answers its observation."""
        if trajectory_id in self._calls:
            return self._calls.pop(trajectory_id)
        return answer_to(context.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0])


def once_named(lesson: Row, tool: str, tokenizer: HFTokenizer) -> Row:
    """The lesson with its call given up to the tool's name: what is left is how well that is carried through."""
    labels = list(lesson["labels"])
    start = next(i for i, label in enumerate(labels) if label != IGNORED)
    call, _, _ = HERMES.write_call(tool, {}).partition('", ')
    end = start + len(tokenizer.encode(call))
    return {**lesson, "labels": [IGNORED] * end + labels[end:]}


def drawn(right: str, tools: Sequence[ToolDescription], rng: random.Random) -> ToolDescription:
    """The tool that an example calls where `right` is the right one."""
    first = next(i for i, tool in enumerate(tools) if tool.name == right)
    return rng.choices([*tools[first:], *tools[:first]], HABIT)[0]


async def lessons(rows: Sequence[Mapping[str, Any]], player: Player, rng: random.Random) -> tuple[list[Row], list[Row]]:
    """What to learn from, and calls of the right tool by which success is measured; of different rows."""
    learned, measured = [], []
    for number, row in enumerate(rows):
        right = row["extra_info"]["tool"]
        if number < MEASURED_ROWS:
            [tool] = [tool for tool in player.tools if tool.name == right]
            [lesson] = to_lessons(await player.play(row, tool, f"row-{number}"))
            measured.append(once_named(lesson, right, player.tokenizer))
        else:
            learned += to_lessons(await player.play(row, drawn(right, player.tools, rng), f"row-{number}"))
    return learned, measured


def texts_of(rows: Sequence[Mapping[str, Any]], tools: Sequence[ToolDescription]) -> list[str]:
    """What the tokenizer is learned from: questions, calls, and answers."""
    texts = ["system", "user", "assistant", "Error: wrong arguments for"] * len(rows)
    for number, row in enumerate(rows):
        called = tools[number % len(tools)]
        texts += [row["prompt"][-1]["content"], call_of(row, called), answer_to(row["reward_model"]["ground_truth"])]
    return texts


def words_in(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The words among the arguments: units, months, and words to spell."""
    found = (value for row in rows for value in json.loads(row["extra_info"]["arguments"]).values())
    return sorted({value for value in found if isinstance(value, str)})


async def made(
    rows: Sequence[Mapping[str, Any]], seed: int
) -> tuple[PreTrainedTokenizerBase, list[ToolDescription], list[Row], list[Row]]:
    """The tokenizer, what it is told of, what to learn from, and what success is measured by."""
    async with InProcessTools(load_tools(str(HERE / "tools.py"))) as tools:
        tokenizer = make_tokenizer(texts_of(rows[:600], tools.describe()), VOCABULARY, CHAT_TEMPLATE)
        # An argument that is one token is copied into a call more surely.
        lines = common_lines(tokenizer, OPTIONS, tools.describe(), rows[0])
        tokenizer.add_tokens([*TAGS, *PIECES, *words_in(rows), *lines])
        player = Player(tokenizer, tools)
        return tokenizer, player.tools, *await lessons(rows, player, random.Random(seed))


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if calls of the right tool do not come out right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    tokenizer, _, learned, measured = asyncio.run(made(rows, seed))
    how = WarmUp(target=0.8, max_steps=600, learning_rate=3e-3, seed=seed)
    warm_up(make_model(tokenizer, hidden=128, layers=2, seed=seed), tokenizer, learned, measured, how, output)


if __name__ == "__main__":
    typer.run(main)
