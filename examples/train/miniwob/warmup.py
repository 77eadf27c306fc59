"""A tiny model that can act on three pages of MiniWoB and mostly does not do what they say; made from scratch.

    python examples/train/miniwob/warmup.py --data data --output outputs/model

It learns from the real pages, as the environment shows them, and from the same pages with other colors. Each action
follows a thought that is drawn: ``the blue one`` acts on the element that the instruction names, and ``any`` on another
one. Which of the two is the right one is left to reinforcement learning.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import Row, WarmUp, encode, make_model, make_tokenizer, warm_up, without_token
from tiny_model import CHAT_TEMPLATE

from verl_tool.environments.miniwob import MiniWobEnvironment

NAMED, ONE, ANY = "<think>the", " one</think>", "<think>any</think>"
"""Each is one token. `NAMED` or `ANY` begins a turn: what the model decides for, whatever comes after it."""
SHARES = {NAMED: 4, ANY: 16}
"""Of twenty turns, how many begin how."""
SHOWN_PAGES = 240
"""Pages that are opened for the lessons."""
MEASURED_PAGES = 48
DECISIONS, ACTIONS = 4000, 8000
"""Lessons in what players do, and further ones in acting on what the instruction names."""
COLORS_SHARE = 0.7
"""Part of the lessons that are of pages with colors in any case: they take the longest to learn."""
CONTEXTS = 6
VOCABULARY = 400
ELEMENT = re.compile(r"^\[(\d+)\] (.*)$", re.MULTILINE)
INSTRUCTIONS = (
    (re.compile(r"Click button (\w+)\."), 'button "{}"', "click"),
    (re.compile(r"Click on the (\w+) colored box\."), "clickable color {}", "click"),
)
FOCUS = re.compile(r"Focus into the ((\d)\w+)")
COLOR = re.compile(r"(?<=color )\w+|\w+(?= colored)")


@dataclass(frozen=True)
class RenderedPage:
    """A page as the environment shows it: the message, the action that solves it, and others."""

    text: str
    word: str
    """By which the instruction names the element."""
    named: str
    others: tuple[str, ...]


def read_page(text: str) -> RenderedPage:
    """Find what solves a page. Raises ValueError for a page that is none of the three."""
    elements = ELEMENT.findall(text)
    focus = FOCUS.match(text)
    if focus is not None:
        word, verb, right = focus[1], "focus", elements[int(focus[2]) - 1][0]
    else:
        found = [(match[1], line, verb) for pattern, line, verb in INSTRUCTIONS if (match := pattern.match(text))]
        if not found:
            raise ValueError(f"no action is known for {text[:80]!r}")
        [(word, line, verb)] = found
        right = next(number for number, shown in elements if shown == line.format(word))
    others = tuple(f"{verb}({number})" for number, _ in elements if number != right)
    return RenderedPage(text, word, f"{verb}({right})", others)


def redraw_colors(page: RenderedPage, colors: Sequence[str], rng: random.Random) -> RenderedPage:
    """The page with any `colors` in place of its own."""
    own = sorted(set(COLOR.findall(page.text)))
    drawn = dict(zip(own, rng.sample(colors, len(own)), strict=True))
    return read_page(COLOR.sub(lambda match: drawn[match[0]], page.text))


async def open_pages(rows: Sequence[Mapping[str, Any]]) -> list[RenderedPage]:
    """Open the pages of rows in the environment, some at a time."""
    environment = MiniWobEnvironment(describe_actions=False)
    await environment.start()
    waiting, pages = iter(enumerate(rows)), dict[int, RenderedPage]()

    async def worker() -> None:
        for number, row in waiting:
            arguments = row["extra_info"]["tools_kwargs"]["environment"]
            session, opening = await environment.begin("", json.loads(arguments))
            pages[number] = read_page(opening.messages[0]["content"])
            await environment.end(session)

    try:
        await asyncio.gather(*(worker() for _ in range(CONTEXTS)))
    finally:
        await environment.close()
    return [pages[number] for number in range(len(rows))]


def build_tokenizer(pages: Sequence[RenderedPage], system: str) -> PreTrainedTokenizerBase:
    """Learned from the pages. Numbers, words of elements and what begins a turn are one token each."""
    texts = [f"system\n{system}\nuser\nassistant\n"] * len(pages) + [page.text for page in pages]
    tokenizer = make_tokenizer(texts, VOCABULARY, CHAT_TEMPLATE)
    words = {f" {word}" for page in pages for word in re.findall(r"[A-Za-z]+", page.text)}
    words |= {word for page in pages for word in re.findall(r"\b[A-Z]{2,}\b", page.text)}
    words |= {f" {page.word}" for page in pages}
    tokenizer.add_tokens([NAMED, ONE, ANY, "click(", "focus(", *sorted(words)])
    return tokenizer


def lesson(tokenizer: PreTrainedTokenizerBase, system: str, page: RenderedPage, begin: str, rng: random.Random) -> Row:
    """The prompt as the loop renders it, and one turn."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": page.text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    action = f" {page.word}{ONE}{page.named}" if begin == NAMED else rng.choice(page.others)
    return encode(tokenizer, [(prompt, False), (f"{begin}{action}{tokenizer.eos_token}", True)])


def draw_page(pages: Sequence[RenderedPage], colored: Sequence[RenderedPage], rng: random.Random) -> RenderedPage:
    """One of `pages`, or of those with colors, which are drawn anew."""
    page = rng.choice(colored if rng.random() < COLORS_SHARE else pages)
    return redraw_colors(page, sorted({color for one in colored for color in COLOR.findall(one.text)}), rng)


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if what is begun right is not ended right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    system = rows[0]["prompt"][0]["content"]
    pages = asyncio.run(open_pages(rows[:SHOWN_PAGES]))
    tokenizer = build_tokenizer(pages, system)
    rng = random.Random(seed)
    measured, pages = pages[:MEASURED_PAGES], pages[MEASURED_PAGES:]
    colored = [page for page in pages if COLOR.search(page.text)]

    def further(begin: str) -> Row:
        return lesson(tokenizer, system, draw_page(pages, colored, rng), begin, rng)

    decision = tokenizer.convert_tokens_to_ids(NAMED)
    learned = [further(begin) for begin in rng.choices([*SHARES], [*SHARES.values()], k=DECISIONS)]
    learned += [without_token(further(NAMED), decision) for _ in range(ACTIONS)]
    tested = [without_token(lesson(tokenizer, system, page, NAMED, rng), decision) for page in measured]
    model = make_model(tokenizer, hidden=128, layers=2, seed=seed)
    # At twice the learning rate it takes twice as long to learn where a color stands.
    how = WarmUp(target=0.95, max_steps=2500, learning_rate=5e-4, seed=seed)
    warm_up(model, tokenizer, learned, tested, how, output)


if __name__ == "__main__":
    typer.run(main)
