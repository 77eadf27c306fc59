"""Questions for the four typed tools of examples/train/function_calling, for the reward manager `gsm8k`.

    python examples/data_preprocess/function_calling.py

A problem is a tool with its two arguments, and is asked in one of three ways; what the tool answers is the ground
truth. No problem of the test split is in the train split, in whichever words.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rows import LocalDir, Row, messages, row, run, save

from verl_tool.util.plugin import import_file

DATA_SOURCE = "function_calling"
TOOLS = import_file(Path(__file__).parents[1] / "train" / "function_calling" / "tools.py")
CALLING = "Call a function, and put the number that it gives in \\boxed{}."
NOT_CALLING = "Put the number in \\boxed{}."
MEASURES = {"miles": "kilometres", "pounds": "kilograms", "gallons": "litres"}
FACTORS = {
    **{"apple": 19, "badge": 49, "beach": 49, "bread": 33, "cabin": 34, "cable": 43, "candle": 25},
    **{"cloud": 18, "dance": 37, "eagle": 33, "garden": 20, "ocean": 26, "peach": 30},
}
"""Words, each with the largest factor; as everywhere here an answer has three digits at most."""
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """The questions that one tool answers."""

    tool: str
    draw: Callable[[random.Random], Arguments]
    """Its arguments, in the order of its signature: a number, and what the number applies to."""
    wordings: tuple[str, ...]


KINDS = (
    Kind(
        "convert",
        lambda rng: {"amount": rng.randint(10, 450) / 10, "unit": rng.choice(sorted(MEASURES))},
        (
            "How many {unit} are {amount} {measure}?",
            "Give {amount} {measure} in {unit}.",
            "{amount} {measure} to {unit}?",
        ),
    ),
    Kind(
        "percentage",
        lambda rng: {"percent": rng.randint(3, 97), "total": rng.randint(11, 99)},
        ("What is {percent}% of {total}?", "How much are {percent} percent of {total}?", "Take {percent}% of {total}."),
    ),
    Kind(
        "day_of_year",
        lambda rng: {"day": rng.randint(1, 28), "month": rng.choice(get_args(TOOLS.Month))},
        (
            "Which day of the year is {day} {month}?",
            "Count the days up to {day} {month}.",
            "What number has {day} {month}?",
        ),
    ),
    Kind(
        "letter_sum",
        lambda rng: {"factor": rng.randint(2, FACTORS[word := rng.choice(sorted(FACTORS))]), "word": word},
        (
            'What is {factor} times the sum of the letters of "{word}"?',
            'Add up {factor} times the letters of "{word}".',
            'Multiply by {factor} the letters of "{word}".',
        ),
    ),
)


@dataclass(frozen=True)
class Question:
    """A problem in words."""

    tool: str
    arguments: Arguments
    text: str

    @property
    def problem(self) -> str:
        """The same in all wordings."""
        return json.dumps([self.tool, self.arguments])


def questions(kind: Kind, number: int, held_out: set[str], rng: random.Random) -> list[Question]:
    """All different, and none of a problem in `held_out`. Raises ValueError if there are not `number` such."""
    drawn: dict[str, Question] = {}
    for _ in range(100 * number):
        arguments = kind.draw(rng)
        text = rng.choice(kind.wordings).format(**arguments, measure=MEASURES.get(str(arguments.get("unit"))))
        question = Question(kind.tool, arguments, text)
        if question.problem not in held_out:
            drawn.setdefault(text, question)
        if len(drawn) == number:
            return list(drawn.values())
    raise ValueError(f"there are no {number} questions for {kind.tool}; take fewer rows")


def splits(train_size: int, test_size: int, seed: int) -> dict[str, list[Question]]:
    """Train and test split, with the same number for each tool. Raises ValueError if a size is too large."""
    rng = random.Random(seed)
    found: dict[str, list[Question]] = {"train": [], "test": []}
    for kind in KINDS:
        test = questions(kind, test_size // len(KINDS), set(), rng)
        found["test"] += test
        found["train"] += questions(kind, train_size // len(KINDS), {each.problem for each in test}, rng)
    for part in found.values():
        rng.shuffle(part)
    return found


async def answers(asked: Sequence[Question]) -> list[str]:
    """What the right tool answers to each."""
    return [str(await getattr(TOOLS, each.tool)(**each.arguments)) for each in asked]


def as_row(question: Question, answer: str, split: str, index: int, tool: bool) -> Row:
    told = {"question": question.text, "tool": question.tool, "arguments": json.dumps(question.arguments)}
    prompt = messages(CALLING if tool else NOT_CALLING, question.text)
    return row(DATA_SOURCE, prompt, "function_calling", answer, split, index, told, tool)


def main(
    local_dir: LocalDir = Path("data/function_calling"),
    train_size: Annotated[int, typer.Option("--train_size", min=4, help="Questions to train on.")] = 2400,
    test_size: Annotated[int, typer.Option("--test_size", min=4, help="Held-out questions.")] = 256,
    tool: Annotated[bool, typer.Option(help="Tell the model to call, and let it.")] = True,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same questions.")] = 0,
) -> None:
    """Make the data set."""
    rows = {}
    for name, asked in splits(train_size, test_size, seed).items():
        solved = zip(asked, asyncio.run(answers(asked)), strict=True)
        rows[name] = [as_row(question, answer, name, i, tool) for i, (question, answer) in enumerate(solved)]
    save(rows, local_dir)


if __name__ == "__main__":
    run(main)
