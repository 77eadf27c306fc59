"""A tiny model that can play guess-the-number carefully, and mostly does not; made from scratch.

    python examples/train/text_game/warmup.py --data data --tool_config CONFIG --output outputs/model

It learns from games that the agent loop itself played, on the environment that the tool server will serve. In one game
of five the player keeps account of what the number may be (``Between 4 and 5:``) and draws any number of these; in the
others it writes ``Maybe`` and any digit, or forgets the box. Further games teach how to go on behind ``Between``. That
it pays to begin so, and which number is best, is left to reinforcement learning.
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
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import IGNORED, Row, WarmUp, make_model, make_tokenizer, warm_up, without_token
from tiny_model import CHAT_TEMPLATE
from trajectory_lessons import ScriptedModel, to_lessons

from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.protocol import ENVIRONMENT_FIELD
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

HERE = Path(__file__).resolve().parent
AGENT = OmegaConf.merge(
    *(OmegaConf.load(HERE / f"{profile}.yaml").actor_rollout_ref.agent for profile in ("gpu", "cpu"))
)
OPTIONS = EpisodeOptions.load(OmegaConf.to_container(AGENT) | {"enable_tqdm": False})
"""The loop's, as the recipe has them."""
CARE, HASTE = "Between ", "Maybe"
"""Each begins a turn and is one token: what the model decides for."""
BOX = r": \boxed{"
CARE_SHARE = 0.2
"""Part of games that are played with care."""
FORGETS_BOX = 0.4
"""Part of hasty turns without a box, which end the game."""
RANGE = re.compile(r"between (\d+) and (\d+)")
HINT = re.compile(r"is (higher|lower) than (\d+)")
FRAGMENTS = (
    *(
        "At turn ",
        ", you guessed ",
        ", and the target number is higher than ",
        ", and the target number is lower than ",
    ),
    *(", which is outside the range specified.\n", ", which has been already guessed before.\n", ".\n"),
    *(CARE, HASTE, BOX, r"\boxed{", " and ", "Enter your next guess."),
)
"""One token each, since so small a model would learn nothing from the words."""
GAMES = 400
"""Of each kind of lesson."""
MEASURED_GAMES = 64


def possible_range(context: str) -> tuple[int, int]:
    """Return the numbers that the hints in `context` leave."""
    low, high = map(int, RANGE.findall(context)[0])
    for hint, number in HINT.findall(context):
        low, high = (max(low, int(number) + 1), high) if hint == "higher" else (low, min(high, int(number) - 1))
    return low, high


def write_turn(context: str, care_share: float, rng: random.Random) -> str:
    """Return a turn in the manner of the game's first one, or of one that is drawn."""
    careful = CARE in context or (HASTE not in context and rng.random() < care_share)
    if careful:
        low, high = possible_range(context)
        return f"{CARE}{low} and {high}{BOX}{rng.randint(low, high)}}}"
    guess = rng.randint(1, 9)
    return f"{HASTE} {guess}" if rng.random() < FORGETS_BOX else f"{HASTE}{BOX}{guess}}}"


async def build_tokenizer(tools: InProcessTools, row: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Make a tokenizer in which each line of the rules is a token, but for numbers in boxes."""
    begun = await tools.call("rules", "", step=0, extra={ENVIRONMENT_FIELD: arguments_of(row)})
    if begun.opening is None:
        raise ValueError(f"the environment does not begin: {begun.fault}")
    await tools.call("rules", "", finish=True)
    rules = "".join(message["content"] for message in begun.opening.messages)
    lines = [line for part in re.split(r"\\boxed\{\d+\}\.\n", rules) for line in re.findall(r"[^\n]+\n*", part)]
    system = row["prompt"][0]["content"]
    tokenizer = make_tokenizer(["system\nuser\nassistant\n"] * 50, 300, CHAT_TEMPLATE)
    tokenizer.add_tokens([*FRAGMENTS, system, *(line for line in lines if len(line) > 3)])
    return tokenizer


def arguments_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the row sends to its environment."""
    return dict(json.loads(row["extra_info"]["tools_kwargs"]["environment"]))


async def play_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: InProcessTools,
    care_share: float,
    seed: int,
) -> list[Row]:
    """Lessons from a game for each row."""
    rng, wrapped, described = random.Random(seed), HFTokenizer(tokenizer), tools.describe()
    formats = LoopFormats(OPTIONS.formats, described)
    opener = PromptOpener(PromptRenderer(wrapped, OPTIONS, described), formats.of)
    model = ScriptedModel(wrapped, lambda context, _: write_turn(context, care_share, rng))
    episode = Episode(model, tools, wrapped, OPTIONS, formats=formats.all)
    found = []
    for number, row in enumerate(rows):
        messages = [dict(message) for message in row["prompt"]]
        prompt, open_prompt = opener.of(messages, None, f"row {number}")
        extra = {ENVIRONMENT_FIELD: arguments_of(row)}
        found += to_lessons(await episode.run(prompt, extra=extra, open_prompt=open_prompt))
    return found


def without_choices(row: Row, care: int, box: int) -> Row:
    """The row with what the model is free to choose given: how it begins, and the number in the box."""
    row = without_token(row, care)
    before = [None, *row["input_ids"]]
    return {**row, "labels": [IGNORED if before[i] == box else label for i, label in enumerate(row["labels"])]}


async def prepare_lessons(
    rows: Sequence[Mapping[str, Any]], config: str, seed: int
) -> tuple[PreTrainedTokenizerBase, list[Row], list[Row]]:
    """The tokenizer, what to learn from, and games by which success is measured."""
    async with InProcessTools(load_tools("text_game", ToolConfig.from_cli(config))) as tools:
        tokenizer = await build_tokenizer(tools, rows[0])
        care, box = tokenizer.convert_tokens_to_ids([CARE, BOX])
        measured = await play_rows(rows[:MEASURED_GAMES], tokenizer, tools, 1.0, seed)
        rows = rows[MEASURED_GAMES:][:GAMES]
        learned = await play_rows(rows, tokenizer, tools, CARE_SHARE, seed)
        learned += [without_token(row, care) for row in await play_rows(rows, tokenizer, tools, 1.0, seed + 1)]
        return tokenizer, learned, [without_choices(row, care, box) for row in measured]


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    tool_config: Annotated[str, typer.Option("--tool_config", help="The tool server's.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if a careful turn, once begun, does not come out right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    tokenizer, learned, measured = asyncio.run(prepare_lessons(rows, tool_config, seed))
    model = make_model(tokenizer, hidden=64, layers=2, seed=seed, deviation=0.05)
    warm_up(
        model, tokenizer, learned, measured, WarmUp(target=0.9, max_steps=600, learning_rate=2e-3, seed=seed), output
    )


if __name__ == "__main__":
    typer.run(main)
