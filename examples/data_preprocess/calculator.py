"""Arithmetic with one decimal, as in TRL's calculator experiment: `python examples/data_preprocess/calculator.py`.

Problems are `a op b` with `a` and `b` from 0.0 to 99.9 and `op` one of + - *. No problem of the test split is in the
train split.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import typer
from rows import row, run, save

DATA_SOURCE = "calculator"


@dataclass(frozen=True)
class Problem:
    """One problem and its exact answer."""

    expression: str
    """Such as ``13.1-3``."""
    answer: str
    """Shortest decimal notation, such as ``10.1``."""

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"


def problem(rng: random.Random) -> Problem:
    """A random problem."""
    a, b = (Decimal(rng.randint(0, 999)) / 10 for _ in range(2))
    operator = rng.choice("+-*")
    result = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return Problem(f"{a}{operator}{b}", f"{result.normalize():f}")


def problems(train_size: int, test_size: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Train and test split: all different, drawn with `seed`."""
    rng = random.Random(seed)
    drawn: dict[str, Problem] = {}
    while len(drawn) < train_size + test_size:
        p = problem(rng)
        drawn.setdefault(p.expression, p)
    everything = list(drawn.values())
    return everything[test_size:], everything[:test_size]


def as_row(p: Problem, split: str, index: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": p.question}]
    return row(DATA_SOURCE, messages, "math", p.answer, split, index, {"question": p.question})


def main(
    local_dir: Path = typer.Option(
        Path("data/calculator"), "--local_dir", help="Where train.parquet and test.parquet go."
    ),
    train_size: int = typer.Option(8192, "--train_size", min=1, max=1_000_000, help="Problems to train on."),
    test_size: int = typer.Option(256, "--test_size", min=1, max=100_000, help="Held-out problems."),
    seed: int = typer.Option(0, "--seed", help="The same seed gives the same problems."),
) -> None:
    """Make the calculator data set."""
    train, test = problems(train_size, test_size, seed)
    splits = {"train": train, "test": test}
    save({name: [as_row(p, name, i) for i, p in enumerate(part)] for name, part in splits.items()}, local_dir)


if __name__ == "__main__":
    run(main)
