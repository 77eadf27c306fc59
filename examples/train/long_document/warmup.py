"""A tiny model that can read a document page by page, and forgets what it has read; made from scratch.

    python examples/train/long_document/warmup.py --data data --documents documents --output outputs/model

It learns from trajectories that the agent loop itself made, with the real tool and the recipe's contexts. Each summary
follows a habit that is drawn by `HABITS`: it has all lines that the question asks for, only those of the last page, or
any line. Which habit is the right one is left to reinforcement learning. Further lessons teach how to go on behind the
first token of a complete summary, and how to copy lines.
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
from make_documents import WORDS
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import Row, WarmUp, encode, make_model, make_tokenizer, warm_up, without_token
from trajectory_lessons import ScriptedModel, common_lines, to_lessons

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.formats import HERMES
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = (HERE.parent / "function_calling" / "chat_template.jinja").read_text(encoding="utf-8")
AGENT = OmegaConf.merge(
    *(OmegaConf.load(HERE / f"{profile}.yaml").actor_rollout_ref.agent for profile in ("gpu", "cpu"))
)
OPTIONS = EpisodeOptions.load(OmegaConf.to_container(AGENT) | {"enable_tqdm": False})
"""The loop's, as the recipe has them."""
READ = HERMES.write_call("read", {})
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""One token each, as in Qwen3's tokenizer."""
KEEP, FORGET, STRAY = "All so far:", "This page:", "A line:"
"""Each begins a summary and is one token: what the model decides for, whatever comes after it."""
NOTHING, UNKNOWN = "Nothing yet.", "unknown"
ANSWER, ANSWER_END = "<answer>", "</answer>"
HABITS = {KEEP: 8, FORGET: 9, STRAY: 3}
"""Of twenty summaries, how many begin how."""
LINE = re.compile(r"^- (\w+) (\w+)", re.MULTILINE)
ASKED = re.compile(r"Which (\w+) is on page (\d+), and which (\w+) on page (\d+)\?")
PAGE = re.compile(r"This is page (\d+) of (\d+)\.\n")
COPYING = 0.5
"""Lessons in copying for each other one."""
VOCABULARY = 400
"""Most tokens, but for words."""
MEASURED_ROWS = 64
DEVIATION = 0.05
"""Of the weights at the start: with the usual 0.02 so small a model takes several times as long until it copies."""


def write_turn(context: str, habits: Mapping[str, int], rng: random.Random) -> str:
    """What is written behind `context`: a call up to the last page, a summary by `habits`, and the answer."""
    [(first, early, second, later)] = ASKED.findall(context)
    page = PAGE.search(context)
    if page is None:
        return READ
    notes, lines = dict(LINE.findall(context[: page.start()])), dict(LINE.findall(context[page.end() :]))
    new = {kind: lines[kind] for kind, number in ((first, early), (second, later)) if number == page[1]}
    if page[1] == page[2]:
        known = notes | new
        lines = (f" {kind} {known.get(kind, UNKNOWN)}" for kind in (first, second))
        return f"{ANSWER}{','.join(lines)}{ANSWER_END}"
    [habit] = rng.choices([*habits], [*habits.values()])
    stray = rng.choice([*lines.items()])
    told = {KEEP: notes | new, FORGET: new, STRAY: dict([stray])}[habit]
    return "\n".join([habit, *(f"- {kind} {word}" for kind, word in told.items())] + [NOTHING] * (not told))


def build_tokenizer(rows: Sequence[Mapping[str, Any]], documents: Path) -> PreTrainedTokenizerBase:
    """Learned from questions and documents. A word of theirs is one token, and so is what all contexts have in
    common."""
    texts = [f"{NOTHING}{ANSWER}{ANSWER_END}user\nassistant\nThere are no more pages."] * len(rows)
    for row in rows:
        texts += [row["prompt"][-1]["content"], (documents / f"{document_name(row)}.txt").read_text(encoding="utf-8")]
    tokenizer = make_tokenizer(texts, VOCABULARY, CHAT_TEMPLATE)
    words = (f" {word}" for kind, words in WORDS.items() for word in (kind, *words, UNKNOWN))
    pages = (f" page {i}" for i in range(1, 1 + max(row["extra_info"]["pages"] for row in rows)))
    common = (KEEP, FORGET, STRAY, OPTIONS.summary_prompt, OPTIONS.summary_continuation, NOTHING, ANSWER, ANSWER_END)
    tokenizer.add_tokens([*TAGS, READ.removeprefix("<tool_call>").removesuffix("</tool_call>")])
    tokenizer.add_tokens([*words, *pages, *common])
    return tokenizer


def copying_lesson(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Row:
    """A lesson in finding lines and copying them, which all else here needs: those of a page, in another order."""
    lines = [f"- {kind} {rng.choice(words)}" for kind, words in WORDS.items()]
    again = rng.sample(lines, len(lines))
    return encode(tokenizer, [("\n".join(lines), False), ("\n\n", False), ("\n".join(again), True)])


def document_name(row: Mapping[str, Any]) -> str:
    """Return the name of the row's document."""
    return str(row["extra_info"]["tools_kwargs"]["document"])


async def play_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: InProcessTools,
    habits: Mapping[str, int],
    seed: int,
) -> list[Row]:
    """Lessons from a trajectory for each row."""
    wrapped = HFTokenizer(tokenizer)
    rng = random.Random(seed)
    model = ScriptedModel(wrapped, lambda context, _: write_turn(context, habits, rng))
    episode = Episode(model, tools, wrapped, OPTIONS)
    prompts, found = PromptRenderer(wrapped, OPTIONS, tools.describe()), []
    for number, row in enumerate(rows):
        prompt = prompts.ids([dict(message) for message in row["prompt"]], None, f"row {number}")
        found += to_lessons(await episode.run(prompt, extra={"document": document_name(row)}))
    return found


async def prepare_lessons(
    rows: Sequence[Mapping[str, Any]], documents: Path, seed: int
) -> tuple[PreTrainedTokenizerBase, list[Row], list[Row]]:
    """The tokenizer, what to learn from, and summaries and answers by which success is measured."""
    tool = str(HERE / "read.py")
    config = ToolConfig.from_cli(json.dumps({"tools": [{"name": tool, "folder": str(documents)}]}))
    async with InProcessTools(load_tools(tool, config)) as tools:
        tokenizer = build_tokenizer(rows[:300], documents)
        tokenizer.add_tokens(common_lines(tokenizer, OPTIONS, tools.describe(), rows[0]))
        learned = await play_rows(rows[MEASURED_ROWS:], tokenizer, tools, HABITS, seed)
        begun = tokenizer.convert_tokens_to_ids(KEEP)
        rows, shown = rows[:MEASURED_ROWS], rows[MEASURED_ROWS:]
        learned += [without_token(row, begun) for row in await play_rows(shown, tokenizer, tools, {KEEP: 1}, seed)]
        rng = random.Random(seed)
        learned += [copying_lesson(tokenizer, rng) for _ in range(int(COPYING * len(learned)))]
        right = await play_rows(rows, tokenizer, tools, {KEEP: 1}, seed)
        return tokenizer, learned, [without_token(row, begun) for row in right]


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    documents: Annotated[Path, typer.Option("--documents", help="Folder with the documents.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if what is begun right is not ended right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    tokenizer, learned, measured = asyncio.run(prepare_lessons(rows, documents, seed))
    model = make_model(tokenizer, hidden=128, layers=2, seed=seed, deviation=DEVIATION)
    how = WarmUp(target=0.92, max_steps=900, learning_rate=2e-3, seed=seed)
    warm_up(model, tokenizer, learned, measured, how, output)


if __name__ == "__main__":
    typer.run(main)
