"""A tiny model that can search, read and answer, and mostly does not search far enough; made from scratch.

    python examples/train/search_r1/warmup.py --data data --tool_config tools.json --output outputs/search_r1/model

It learns from trajectories for the training questions (`HABITS`), whose observations are those of the real tool on the
world's index. Most of them answer from nowhere, or from the first page where a second one is needed. How far to search
is left to reinforcement learning.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from make_world import HOME, TOWNS, TRADES, WORDS, Person, Question

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import END, Row, WarmUp, make_model, make_tokenizer, warm_up
from tiny_model import CHAT_TEMPLATE, Lesson, encode_lesson, learned, measured, texts_of
from traces import Part, Trace
from transformers import PreTrainedTokenizerBase

from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

TOOLS = "search_retrieval,finish"
SEARCH, SEARCH_END, ANSWER, ANSWER_END = "<search>", "</search>", "<answer>", "</answer>"
PAGE, PAGE_END = "<information>Doc 1(Title:", "</information>"
THOUGHT, THOUGHT_END = "<think>", "</think>"
_END = ANSWER_END + END
"""With the token that ends a turn, which the model writes where no stop string ends it: without tools."""
TAGS = (THOUGHT, THOUGHT_END, SEARCH, SEARCH_END, ANSWER, ANSWER_END, PAGE, PAGE_END)
"""One token each, as are the words of the world with the space before them."""
HABITS = {
    1: {"right": 5, "guess": 15},
    2: {"right": 3, "first page": 12, "guess": 5},
}
"""Of twenty trajectories for a question of so many hops, how many end how."""
VOCABULARY = 400
"""Most tokens, but for words."""
MEASURED_QUESTIONS = 256
DEVIATION = 0.05
"""Of the weights at the start: with the usual 0.02 so small a model takes several times as long until it copies."""
NAME_ON_PAGE = (1, 2, 4, 5)
"""Tokens behind `PAGE` that are the name: in the title, and where the text begins."""


class Reader:
    """Reads pages by the real tool, each once."""

    def __init__(self, tools: InProcessTools) -> None:
        self._tools = tools
        self._read: dict[str, str] = {}

    async def observation(self, name: str) -> str:
        """What a search for the name is answered."""
        if name not in self._read:
            self._read[name] = (await self._tools.call(name, f"{SEARCH} {name}{SEARCH_END}", step=0)).observation
            await self._tools.call(name, "", finish=True)
        return self._read[name]


async def trace_of(question: Question, habit: str, reader: Reader, rng: random.Random) -> Trace:
    """A trajectory that goes as `habit` says. Of each page one fact is thought of before it is used; which one is free
    where the question names two."""
    *between, what = question.path
    if habit == "guess":
        guess = rng.choice(TOWNS if what == HOME else TRADES)
        return [Part(ANSWER, True, free=True), Part(f" {guess}", True, free=True), Part(_END, True)]
    facts = [what] if habit == "first page" else [*between, what]
    trace, whom = [Part(SEARCH, True, free=True)], question.person
    for number, fact in enumerate(facts):
        observation = await reader.observation(whom)
        found = str(getattr(Person.on(observation), fact))
        trace += [
            *(Part(f" {whom}{SEARCH_END}", True), Part(observation, False), Part(THOUGHT, True)),
            *(Part(f" {fact}", True, free=number < len(between)), Part(f" {found}{THOUGHT_END}", True)),
        ]
        if number + 1 < len(facts):
            trace.append(Part(SEARCH, True))
        whom = found
    return [*trace, Part(f"{ANSWER} {whom}{_END}", True)]


async def lessons(
    rows: Sequence[Mapping[str, Any]], tools: ToolConfig, rng: random.Random
) -> tuple[list[Lesson], list[Lesson]]:
    """For each row one to learn from; and right ones for some, by which success is measured."""
    async with InProcessTools(load_tools(TOOLS, tools)) as running:
        reader = Reader(running)
        taught, right = [], []
        for number, row in enumerate(rows):
            question = Question.of(row["extra_info"]["id"])
            messages = [dict(message) for message in row["prompt"]]
            habits = HABITS[len(question.path)] if row["use_tool"] else {"guess": 1}
            [habit] = rng.choices([*habits], [*habits.values()])
            taught.append(Lesson(messages, [await trace_of(question, habit, reader, rng)]))
            if number < MEASURED_QUESTIONS:
                best = "right" if row["use_tool"] else "guess"
                right.append(Lesson(messages, [await trace_of(question, best, reader, rng)]))
    return taught, right


def tokenizer_of(lessons: Sequence[Lesson]) -> PreTrainedTokenizerBase:
    """Made for them; tags and the world's words are one token each."""
    tokenizer = make_tokenizer(texts_of(lessons), VOCABULARY, CHAT_TEMPLATE)
    tokenizer.add_tokens([*TAGS, *(f" {word}" for word in WORDS)])
    return tokenizer


def with_names(row: Row, page: int) -> Row:
    """The lesson with a label on the name of each page too (`page`: the token of `PAGE`): it is that of the query, and
    a model that foresees it has learned to copy, which all else here needs."""
    ids, labels = row["input_ids"], list(row["labels"])
    for start in (i for i, token in enumerate(ids) if token == page):
        for place in NAME_ON_PAGE:
            labels[start + place] = ids[start + place]
    return {"input_ids": ids, "labels": labels}


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    tool_config: Annotated[str, typer.Option("--tool_config", help="As for the tool server: a file, or JSON.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if what is begun right is not ended right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    taught, right = asyncio.run(lessons(rows, ToolConfig.from_cli(tool_config), random.Random(seed)))
    tokenizer = tokenizer_of(taught[:600])
    page = tokenizer.convert_tokens_to_ids(PAGE)
    learned_rows = [with_names(row, page) for lesson in taught for row in encode_lesson(tokenizer, lesson, learned)]
    measured_rows = [row for lesson in right for row in encode_lesson(tokenizer, lesson, measured)]
    model = make_model(tokenizer, hidden=128, layers=2, seed=seed, deviation=DEVIATION)
    how = WarmUp(target=0.97, max_steps=400, learning_rate=5e-3, seed=seed)
    warm_up(model, tokenizer, learned_rows, measured_rows, how, output)


if __name__ == "__main__":
    typer.run(main)
