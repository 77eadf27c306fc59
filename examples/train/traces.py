"""Solutions to learn from, for the tiny models that recipes train on a CPU: how a trajectory of the recipe looks.

Mathematics: a program prints the answer, and the answer is given. Code: the function is tried out, and given. Without a
tool the answer is given at once. The words of the tool are those of the tool server, character by character.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "acecoder"))
from one_liners import OneLiner

STOP = "```output"
END = "<|im_end|>"
"""What the model closes its turn with."""
TRIED_WITH = 2
"""The argument with which a function is tried out."""


@dataclass(frozen=True)
class Part:
    """A piece of a trajectory's text behind the prompt."""

    text: str
    learned: bool
    """Whether the model writes it."""


Trace = list[Part]


def trace_of(row: Mapping[str, Any]) -> Trace | None:
    """A solution of a row of verl's; None if none is known."""
    if row["ability"] == "code":
        return _code(row)
    answer = str(row["reward_model"]["ground_truth"])
    return _with_tool(row, f"print({answer!r})", answer, f"\\boxed{{{answer}}}")


def _code(row: Mapping[str, Any]) -> Trace | None:
    problem = OneLiner.of(row["extra_info"]["question"])
    if problem is None:
        return None
    attempt = f"{problem.code}\nprint({problem.name}({TRIED_WITH}))"
    return _with_tool(row, attempt, str(problem.value(TRIED_WITH)), f"```python\n{problem.code}\n```")


def _with_tool(row: Mapping[str, Any], program: str, printed: str, answer: str) -> Trace:
    final = Part(f"{answer}{END}", True)
    if not row["use_tool"]:
        return [final]
    return [Part(f"```python\n{program}\n{STOP}", True), Part(f"\n{printed}\n```\n", False), final]
