"""Solutions to learn from, for the tiny models that recipes train on a CPU: how a trajectory of the recipe looks.

Mathematics: a program prints the answer, and the answer is given; without a tool it is given at once. Code: two
traces of nine find the operator by a program, the others guess it, and so do all without a tool. The words of the tool
are those of the tool server, character by character.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "acecoder"))
from one_liners import OPERATORS, OneLiner

STOP = "```output"
END = "<|im_end|>"
"""What the model closes its turn with."""
SEARCHES = 2
"""Traces of a one-liner that ask the tool; there is one guess for each of the seven operators."""


@dataclass(frozen=True)
class Part:
    """A piece of a trajectory's text behind the prompt."""

    text: str
    learned: bool
    """Whether the model writes it."""
    free: bool = False
    """Whether the trace could as well go on otherwise here; the model's success is not measured by such parts."""


Trace = list[Part]


def traces_of(row: Mapping[str, Any]) -> list[Trace]:
    """Ways to go about a row of verl's, each as likely as the others, the best first; none if none is known."""
    if row["ability"] == "code":
        problem = OneLiner.of(row["extra_info"]["question"])
        return [] if problem is None else _code(problem, row["use_tool"])
    answer = str(row["reward_model"]["ground_truth"])
    final = Part(f"\\boxed{{{answer}}}{END}", True)
    return [[*_run(f"print({answer!r})", answer), final] if row["use_tool"] else [final]]


def _code(problem: OneLiner, use_tool: bool) -> list[Trace]:
    search = [Part("Try", True, free=True), Part(" all of them.\n", True), *_run(problem.search, problem.operator)]
    final = Part(f"```python\n{problem.code}\n```{END}", True)
    guesses = [_guess(problem, operator) for operator in OPERATORS]
    return [[*search, final]] * (SEARCHES if use_tool else 0) + guesses


def _guess(problem: OneLiner, operator: str) -> Trace:
    before, behind = problem.code_with(operator).split(operator)
    return [
        Part("Guess", True, free=True),
        Part(f" one of them.\n```python\n{before}", True),
        Part(operator, True, free=True),
        Part(f"{behind}\n```{END}", True),
    ]


def _run(program: str, printed: str) -> Trace:
    return [Part(f"```python\n{program}\n{STOP}", True), Part(f"\n{printed}\n```\n", False)]
