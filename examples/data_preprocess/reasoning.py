"""Endless problems from reasoning-gym (PyPI), whose answers a program can check, for the manager `reasoning_gym`.

    python examples/data_preprocess/reasoning.py --task basic_arithmetic,countdown

Nothing is downloaded: problems are made from a seed. Only tasks with one right answer are offered, and countdown, whose
answers are checked by our own parser; several of reasoning-gym's own graders evaluate the answer as Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from math_prompts import system_prompt
from reasoning_gym import create_dataset
from rows import LocalDir, Row, Seed, convert, messages, row, run, save

DATA_SOURCE = "reasoning_gym"
TASKS = (
    "basic_arithmetic",
    "bitwise_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "count_bits",
    "count_primes",
    "countdown",
    "decimal_chain_sum",
    "fraction_simplification",
    "gcd",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_sequence",
    "products",
    "simple_equations",
    "word_sequence_reversal",
)
COUNTDOWN = "countdown"


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool) -> Row:
    """One problem. Countdown's ground truth is JSON of its numbers and target."""
    task, answer = source["task"], source["answer"]
    if task == COUNTDOWN:
        answer = json.dumps({name: source["metadata"][name] for name in ("numbers", "target")})
    prompt = messages(system_prompt(tool), source["question"])
    extra = {"question": source["question"], "task": task}
    return row(f"{DATA_SOURCE}/{task}", prompt, "math", answer, split, index, extra, tool)


def problems(tasks: tuple[str, ...], size: int, seed: int) -> Iterator[dict[str, Any]]:
    """`size` problems, the tasks in turn. Raises ValueError for a task that is not offered, naming those that are."""
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ValueError(f"--task {','.join(unknown) or '(none)'} is unknown; known: {', '.join(TASKS)}")
    made = [create_dataset(task, size=-(-size // len(tasks)), seed=seed) for task in tasks]
    for i in range(size):
        task = tasks[i % len(tasks)]
        yield {**made[i % len(tasks)][i // len(tasks)], "task": task}


def main(
    task: Annotated[str, typer.Option("--task", help=f"Separated by commas: {', '.join(TASKS)}")] = "basic_arithmetic",
    local_dir: LocalDir = Path("data/reasoning_gym"),
    train_size: Annotated[int, typer.Option("--train_size", min=1, max=1_000_000)] = 8192,
    test_size: Annotated[int, typer.Option("--test_size", min=1, max=100_000)] = 256,
    tool: Annotated[bool, typer.Option(help="Tell the model about the interpreter, and let it be used.")] = True,
    seed: Seed = 0,
) -> None:
    """Make a data set of reasoning-gym's problems. No problem of the test split is in the train split."""
    tasks = tuple(part.strip() for part in task.split(",") if part.strip())
    test = list(problems(tasks, test_size, 2 * seed + 1))
    held_out = {problem["question"] for problem in test}
    train = [problem for problem in problems(tasks, train_size, 2 * seed) if problem["question"] not in held_out]
    save(convert({"train": train, "test": test}, partial(as_row, tool=tool)), local_dir)


if __name__ == "__main__":
    run(main)
