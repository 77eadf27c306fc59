"""One-line functions in AceCode-87K's schema: problems that a model of a few hundred thousand weights can learn.

    python examples/train/acecoder/one_liners.py --output one_liners.jsonl

`examples/data_preprocess/acecoder.py` reads them as it reads the real data set. Behind them come the hand-made rows of
`examples/data_preprocess/samples/`, which that model cannot solve.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

SAMPLES = Path(__file__).parents[2] / "data_preprocess" / "samples" / "acecoder.jsonl"
OPERATORS = {"plus": "+", "minus": "-", "times": "*", "modulo": "%", "to the power of": "**"}
NAMES = ("f", "g", "h", "p", "q")
QUESTION = "Write a function `{name}(x)` that returns x {operation} {number}."
_QUESTION = re.compile(re.escape(QUESTION).replace(r"\{", "(?P<").replace(r"\}", ">.+)"))


@dataclass(frozen=True)
class OneLiner:
    """A function of one argument."""

    name: str
    operation: str
    """A key of `OPERATORS`."""
    number: int

    @classmethod
    def of(cls, question: str) -> OneLiner | None:
        """The function that a question asks for; None if it is another kind of question."""
        found = _QUESTION.fullmatch(question)
        return found and cls(found["name"], found["operation"], int(found["number"]))

    @property
    def question(self) -> str:
        return QUESTION.format(name=self.name, operation=self.operation, number=self.number)

    @property
    def code(self) -> str:
        """A right answer."""
        return f"def {self.name}(x):\n    return x {OPERATORS[self.operation]} {self.number}"

    def value(self, x: int) -> int:
        """The function's value."""
        k = self.number
        return {"+": x + k, "-": x - k, "*": x * k, "%": x % k, "**": x**k}[OPERATORS[self.operation]]

    def as_source_row(self) -> dict[str, Any]:
        """A row of AceCode-87K. No other operation passes all tests."""
        tests = [f"assert {self.name}({x}) == {self.value(x)}" for x in (0, 1, 2, 5, 13)]
        identity = f"{self.name}_{self.operation.replace(' ', '_')}_{self.number}"
        return {
            "id": identity,
            "source": "one_liners",
            "question": self.question,
            "test_cases": tests,
            "inputs_outputs": None,
            "inferences": [],
            "context_messages": [],
        }


def one_liners() -> list[OneLiner]:
    """All of them, in a fixed random order."""
    every = [OneLiner(name, operation, k) for name in NAMES for operation in OPERATORS for k in range(2, 10)]
    random.Random(0).shuffle(every)
    return every


def main(output: Annotated[Path, typer.Option("--output", help="The file to write.")]) -> None:
    """Write the problems, one JSON object a line."""
    rows = [problem.as_source_row() for problem in one_liners()]
    rows += [{"inputs_outputs": None} | json.loads(line) for line in SAMPLES.read_text("utf-8").splitlines()]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    print(f"{len(rows)} problems -> {output}")


if __name__ == "__main__":
    typer.run(main)
