"""A tiny model that can ask, order and name a price, and mostly orders without asking; made from scratch.

    python examples/train/ask_the_user/warmup.py --data data --output outputs/model

It learns from trajectories that the agent loop itself made, with the real environment and domain. What their first turn
does is drawn by `HABITS`: it asks for what is missing, asks for something else, or orders with a guess. Which is right
is left to reinforcement learning.
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

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "data_preprocess")]
from ask_the_user import KNOWN, PRICES, WORDS
from from_scratch import Row, WarmUp, make_model, make_tokenizer, once_begun, warm_up
from trajectory_lessons import ScriptedModel, common_lines, to_lessons

from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.environments.simulated_user.domain import Domain
from verl_tool.formats import HERMES
from verl_tool.protocol import ENVIRONMENT_FIELD
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

HERE = Path(__file__).resolve().parent
DOMAIN = HERE / "orders.py"
CHAT_TEMPLATE = (HERE.parent / "function_calling" / "chat_template.jinja").read_text(encoding="utf-8")
AGENT = OmegaConf.merge(
    *(OmegaConf.load(HERE / f"{profile}.yaml").actor_rollout_ref.agent for profile in ("gpu", "cpu"))
)
OPTIONS = EpisodeOptions.load(OmegaConf.to_container(AGENT) | {"enable_tqdm": False})
"""The loop's, as the recipe has them."""
RIGHT, NEXT, OTHER, GUESS = "right", "next", "other", "guess"
HABITS = {RIGHT: 4, NEXT: 2, OTHER: 1, GUESS: 13}
"""Of twenty first turns, how many ask for what is missing, for one of the other two details, or order with a guess."""
KINDS = tuple(WORDS)
QUESTIONS = {kind: f"Which {kind}?" for kind in KINDS}
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""One token each, as in Qwen3's tokenizer."""
VOCABULARY = 400
"""Maximum number of tokens, without words."""
MEASURED_ROWS = 128
DEVIATION = 0.05
"""Of the weights at the start: with the usual 0.02 so small a model takes several times as long until it copies."""
PRICE = re.compile(r"price (\d+)")


def named_words(text: str) -> dict[str, str]:
    """Return the details that a text names, by kind."""
    words = set(re.findall(r"\w+", text))
    return {kind: word for kind in KINDS for word in WORDS[kind] if word in words}


def write_turn(context: str, habit: str, rng: random.Random) -> str:
    """What is written behind `context`: a question or an order at first, then the order, then the price."""
    dialogue = context.rpartition("<|im_start|>system\n")[2].partition("<|im_end|>")[2]
    found = PRICE.search(dialogue)
    if found is not None:
        return found[0]
    known = named_words(dialogue)
    if "Which" not in dialogue and habit != GUESS:
        [missing] = set(KINDS) - set(known)
        step = (RIGHT, NEXT, OTHER).index(habit)
        return QUESTIONS[KINDS[(KINDS.index(missing) + step) % len(KINDS)]]
    return HERMES.write_call("order", {kind: known.get(kind) or rng.choice(WORDS[kind]) for kind in KINDS})


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Learned from requests. A detail, a price, a question and what all calls have in common are one token each."""
    tokenizer = make_tokenizer([*texts, f"system\nuser\nassistant\nprice {KNOWN}" * 10], VOCABULARY, CHAT_TEMPLATE)
    call = ['{"name": "order", "arguments": {"item": "', *(f'", "{kind}": "' for kind in KINDS[1:]), '"}}']
    tokenizer.add_tokens(
        [
            "system",
            "user",
            "assistant",
            "price",
            *TAGS,
            *call,
            *QUESTIONS.values(),
            KNOWN,
            *(f" {price}" for price in PRICES),
        ]
    )
    tokenizer.add_tokens([word for words in WORDS.values() for word in words])
    return tokenizer


async def play_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: InProcessTools,
    habits: Mapping[str, int],
    seed: int,
) -> list[Row]:
    """Return a lesson from a trajectory for each row."""
    rng = random.Random(seed)
    drawn = rng.choices([*habits], [*habits.values()], k=len(rows))
    # A second trajectory with the same id would be answered from the record.
    name = "+".join(habits)
    wrapped = HFTokenizer(tokenizer)
    habit_of = {f"{name}-{number}": habit for number, habit in enumerate(drawn)}
    model = ScriptedModel(wrapped, lambda context, key: write_turn(context, habit_of[key], rng))
    described = tools.describe()
    formats = LoopFormats(OPTIONS.formats, described)
    opener = PromptOpener(PromptRenderer(wrapped, OPTIONS, described), formats.of)
    episode = Episode(model, tools, wrapped, OPTIONS, formats=formats.all)
    lessons = []
    for number, row in enumerate(rows):
        prompt, open_prompt = opener.of([dict(message) for message in row["prompt"]], None, f"row {number}")
        extra = {ENVIRONMENT_FIELD: json.loads(row["extra_info"]["tools_kwargs"]["environment"])}
        trajectory = await episode.run(prompt, trajectory_id=f"{name}-{number}", extra=extra, open_prompt=open_prompt)
        lessons += to_lessons(trajectory)
    return lessons


async def prepare_lessons(
    rows: Sequence[Mapping[str, Any]], seed: int
) -> tuple[PreTrainedTokenizerBase, list[Row], list[Row]]:
    """Return the tokenizer, what to learn from, and trajectories that ask rightly, by which success is measured."""
    config = ToolConfig.from_cli(json.dumps({"tools": [{"name": "user", "domain": str(DOMAIN)}]}))
    requests = [json.loads(row["extra_info"]["tools_kwargs"]["environment"])["script"]["first"] for row in rows]
    async with InProcessTools(load_tools("user", config)) as tools:
        tokenizer = build_tokenizer(requests[:300])
        tokenizer.add_tokens(common_lines(tokenizer, OPTIONS, Domain(DOMAIN).tools, rows[0]))
        learned = await play_rows(rows[MEASURED_ROWS:], tokenizer, tools, HABITS, seed)
        measured = await play_rows(rows[:MEASURED_ROWS], tokenizer, tools, {RIGHT: 1}, seed)
        return tokenizer, learned, [once_begun(row) for row in measured]


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if what is begun right is not ended right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    tokenizer, learned, measured = asyncio.run(prepare_lessons(rows, seed))
    model = make_model(tokenizer, hidden=128, layers=2, seed=seed, deviation=DEVIATION)
    warm_up(model, tokenizer, learned, measured, WarmUp(0.95, max_steps=900, learning_rate=2e-3, seed=seed), output)


if __name__ == "__main__":
    typer.run(main)
