"""One-line functions in AceCode-87K's schema: problems that a model of a few hundred thousand weights can learn.

    python examples/train/acecoder/one_liners.py --output one_liners.jsonl

Which operator a function has is told by an example only: a program finds it by trying them all, and without an
interpreter it must be guessed. `examples/data_preprocess/acecoder.py` reads these as it reads the real data set.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

OPERATORS = "+-*%&|^"
NAMES = "fghpq"
NUMBERS = range(3, 10)
TEST_ARGUMENTS = (0, 1, 2, 5, 13, 29, 47, 90)
"""On these no two operators agree everywhere, whatever the number."""
QUESTION = "Write `{name}(x)`: x and {number} joined by one of + - * % & | ^; {name}({argument}) == {value}."
_QUESTION = re.compile(
    r"Write `(?P<name>\w)\(x\)`: x and (?P<number>\d+) joined by one of \+ - \* % & \| \^; "
    r"(?P=name)\((?P<argument>\d+)\) == (?P<value>\d+)\."
)


def joined(x: int, operator: str, number: int) -> int:
    """``x operator number``."""
    return {
        "+": x + number,
        "-": x - number,
        "*": x * number,
        "%": x % number,
        "&": x & number,
        "|": x | number,
        "^": x ^ number,
    }[operator]


@dataclass(frozen=True)
class OneLiner:
    """A function of one argument, and the example by which its operator is known."""

    name: str
    number: int
    argument: int
    operator: str

    @classmethod
    def of(cls, question: str) -> OneLiner | None:
        """The function that a question asks for; None if it is another kind of question."""
        found = _QUESTION.fullmatch(question)
        if found is None:
            return None
        number, argument, value = (int(found[name]) for name in ("number", "argument", "value"))
        (operator,) = (o for o in OPERATORS if joined(argument, o, number) == value)
        return cls(found["name"], number, argument, operator)

    @property
    def value(self) -> int:
        """At the example's argument."""
        return joined(self.argument, self.operator, self.number)

    @property
    def clear(self) -> bool:
        """Whether the example fits no other operator."""
        return sum(joined(self.argument, o, self.number) == self.value for o in OPERATORS) == 1

    @property
    def question(self) -> str:
        return QUESTION.format(name=self.name, number=self.number, argument=self.argument, value=self.value)

    @property
    def code(self) -> str:
        """A right answer."""
        return self.code_with(self.operator)

    def code_with(self, operator: str) -> str:
        """An answer, right or wrong."""
        return f"def {self.name}(x):\n    return x {operator} {self.number}"

    @property
    def search(self) -> str:
        """A program that prints the operator."""
        tried = f"eval(f'{self.argument} {{o}} {self.number}')"
        return f"for o in '{OPERATORS}':\n    if {tried} == {self.value}:\n        print(o)"

    def as_source_row(self) -> dict[str, Any]:
        """A row of AceCode-87K. No other operation passes all tests."""
        values = ((x, joined(x, self.operator, self.number)) for x in TEST_ARGUMENTS)
        return {
            "id": f"{self.name}_{self.number}_{self.argument}_{self.value}",
            "source": "one_liners",
            "question": self.question,
            "test_cases": [f"assert {self.name}({x}) == {value}" for x, value in values],
            "inputs_outputs": None,
            "inferences": [],
            "context_messages": [],
        }


def one_liners(count: int) -> list[OneLiner]:
    """`count` different ones, always the same, operators in equal parts."""
    rng = random.Random(0)
    found: dict[OneLiner, None] = {}
    while len(found) < count:
        operator = OPERATORS[len(found) % len(OPERATORS)]
        problem = OneLiner(rng.choice(NAMES), rng.choice(NUMBERS), rng.randrange(10, 100), operator)
        if problem.clear:
            found[problem] = None
    return list(found)


def main(
    output: Annotated[Path, typer.Option("--output", help="The file to write.")],
    count: Annotated[int, typer.Option("--count", min=1, max=5000, help="Problems.")] = 1500,
) -> None:
    """Write the problems, one JSON object a line."""
    rows = [problem.as_source_row() for problem in one_liners(count)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    print(f"{len(rows)} problems -> {output}")


if __name__ == "__main__":
    typer.run(main)
