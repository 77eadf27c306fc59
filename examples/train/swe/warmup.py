"""A tiny model that can read a file and edit it, and mostly writes a wrong operator; made from scratch.

    python examples/train/swe/warmup.py --data data/train.parquet --output outputs/model

It learns from `traces.py`'s examples for the rows to train on, of which most have the operator of another operation.
Which one the file asks for is left to reinforcement learning. A name or an operator is one token. Further lessons teach
how to copy lines.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated

import typer
from tiny_projects import FILES, FUNCTIONS, ISSUE, NAMES, OPERATIONS
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import Row, WarmUp, console, encode, make_model, make_tokenizer, warm_up
from tiny_model import CHAT_TEMPLATE, encode_lesson, learned, lessons_in, measured
from traces import EDIT, EDIT_END, NEW, OLD, READ, READ_END, RESULT, RESULT_END

VOCABULARY = 320
"""Most tokens, but for words."""
COPYING_LESSONS, COPYING = 2000, 0.5
"""Different lessons in copying, and how often one is drawn for each other lesson."""
LINES = 4
"""Of a lesson in copying."""
MEASURED = 64
"""Rows by which success is measured, and from which nothing is learned."""
DEVIATION = 0.05
"""Of the weights at the start: with the usual 0.02 so small a model takes several times as long until it copies."""
ATTEMPTS, SEEDS = 3, 1000
"""Initialisations that are tried, and how far apart their seeds are."""


def build_tokenizer() -> PreTrainedTokenizerBase:
    """A word of a project is one token, and so is what all calls and issues have in common."""
    tokenizer = make_tokenizer(["user\nassistant\n"] * 2, VOCABULARY, CHAT_TEMPLATE)
    names = [name for pair in NAMES for name in pair]
    tokenizer.add_tokens([READ, READ_END, RESULT, RESULT_END, EDIT, OLD, NEW, EDIT_END])
    tokenizer.add_tokens([*ISSUE.replace("{function}", "").split("{file}"), "\ndef ", "): return", "\n\n"])
    tokenizer.add_tokens([f"{before}{name}" for before in ("# ", "(", " ") for name in names])
    tokenizer.add_tokens([*FILES, *FUNCTIONS, *(f" {word}" for pair in OPERATIONS.items() for word in pair)])
    return tokenizer


def copying_lesson(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Row:
    """A lesson in finding lines and copying them, which all else here needs: lines of functions, in another order."""
    lines = []
    for name, (first, second) in zip(rng.sample(FUNCTIONS, LINES), rng.sample(NAMES, LINES), strict=True):
        operator = rng.choice([*OPERATIONS.values()])
        lines.append(f"\ndef {name}({first}, {second}): return {first} {operator} {second}")
    again = rng.sample(lines, len(lines))
    return encode(tokenizer, [("".join(lines), False), ("\n\n", False), ("".join(again), True)])


def prepare_lessons(data: Path, seed: int) -> tuple[PreTrainedTokenizerBase, list[Row], list[Row]]:
    """The tokenizer, what to learn from, and right edits by which success is measured."""
    tokenizer, lessons, rng = build_tokenizer(), lessons_in([data]), random.Random(seed)
    rows = [row for lesson in lessons[MEASURED:] for row in encode_lesson(tokenizer, lesson, learned)]
    copying = [copying_lesson(tokenizer, rng) for _ in range(COPYING_LESSONS)]
    rows += rng.choices(copying, k=int(COPYING * len(rows)))
    return tokenizer, rows, [encode_lesson(tokenizer, lesson, measured)[-1] for lesson in lessons[:MEASURED]]


def main(
    data: Annotated[Path, typer.Option("--data", help="train.parquet.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    target: Annotated[float, typer.Option("--target", min=0.0, max=1.0, help="Stop at this success, sampled.")] = 0.95,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if edits with a given operator do not come out right often enough."""
    tokenizer, rows, held = prepare_lessons(data, seed)
    how = WarmUp(target=target, max_steps=1000, learning_rate=2e-3, seed=seed, give_up_after=300)
    for attempt in range(ATTEMPTS):
        model = make_model(tokenizer, hidden=128, layers=2, seed=seed + attempt * SEEDS, deviation=DEVIATION)
        try:
            return warm_up(model, tokenizer, rows, held, how, output)
        except typer.Exit:
            if attempt + 1 == ATTEMPTS:
                raise
            console.print("begins again from another initialisation")


if __name__ == "__main__":
    typer.run(main)
