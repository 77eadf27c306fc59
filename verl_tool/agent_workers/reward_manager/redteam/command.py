"""Attacks a reward manager with answers that are wrong, and tells which of them it takes for right.

    python -m verl_tool.agent_workers.reward_manager.redteam gsm8k
    python -m verl_tool.agent_workers.reward_manager.redteam mine.py --data rows.parquet
    python -m verl_tool.agent_workers.reward_manager.redteam acecoder --option server_url=http://127.0.0.1:5000

A false positive is a wrong answer with `acc` 1, with a score above that of "I do not know.", with a fault, which
excuses it, or one on which the manager hangs or crashes. A manager may declare that it gives partial credit: then a
score that reaches a right answer's counts, and the highest one below is told. Exit code 0: none; 1: some; 2: the
manager or its data cannot be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from verl_tool.agent_workers.reward_manager.grading.given_rows import options_of, read_rows
from verl_tool.agent_workers.reward_manager.grading.manager_process import (
    Answer,
    Case,
    Graded,
    UnusableError,
    graded_in_child,
)
from verl_tool.agent_workers.reward_manager.redteam.attacks import FORMS, Attack, attacks_on, golden_text

SECONDS = 120.0
"""For one attack; a manager's own deadlines are shorter."""
MOST_HANGS = 3
"""More are not waited for."""
PLAIN = Attack("nothing", (("model", "I do not know."),))
"""What it scores is what a wrong answer deserves."""
RIGHT = "right"
"""Name of what is no attack: the golden answer in one form after another, to see that any is taken for right."""
ADD = "def add(a, b):\n    return a + b"
ADD_TESTS = json.dumps({"tests": ["assert add(731, 92) == 823", "assert add(-4, 1) == -3"]})
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"ground_truth": "72"}, {"ground_truth": "0.5"}],
    "calculator": [{"ground_truth": "72"}],
    "search_r1_qa_em": [{"ground_truth": '["Danube"]'}, {"ground_truth": '["The A"]'}, {"ground_truth": '["72"]'}],
    "reasoning_gym": [
        {"ground_truth": "72"},
        {"ground_truth": "yes"},
        {"ground_truth": '{"numbers": [6, 61, 94, 4], "target": 309}', "data_source": "reasoning_gym/countdown"},
    ],
    "search_f1": [
        {"ground_truth": '["Danube"]'},
        {"ground_truth": '["Johann Sebastian Bach", "Bach"]'},
        {"ground_truth": '["yes"]'},
    ],
    "deepsearch": [{"ground_truth": '["Danube"]'}, {"ground_truth": '["72"]'}],
    "torl": [{"ground_truth": "72"}, {"ground_truth": r"\frac{1}{2}"}],
    "mt_torl": [{"ground_truth": "72"}],
    "pixel_reasoner": [{"ground_truth": "72"}, {"ground_truth": "B"}, {"ground_truth": "red car"}],
    "simple_tir": [{"ground_truth": "72"}, {"ground_truth": r"\frac{1}{2}"}],
    "acecoder": [{"ground_truth": ADD_TESTS, "answer": ADD}],
    "mathcoder": [{"ground_truth": "72", "ability": "math"}, {"ground_truth": ADD_TESTS, "answer": ADD}],
}
"""Rows for the managers of this folder: the golden answer as a solver would write it is `answer`, if it is another."""
DEFAULT = [{"ground_truth": "72"}, {"ground_truth": "Danube"}]


@dataclass(frozen=True)
class Finding:
    """An attack that succeeded."""

    attack: Answer
    ground_truth: str
    score: float


@dataclass
class Report:
    """What the attacks have shown so far."""

    found: list[Finding] = field(default_factory=list)
    paid: bool = False
    """Whether the golden answer was taken for right, in any form."""
    hangs: int = 0
    credit: tuple[float, str] = (0.0, "")
    """The highest partial credit that a wrong answer got, as a share of a right one's, and the attack."""
    _least: float = 0.0
    _most: float = -math.inf

    def add(self, case: Case, graded: Graded) -> None:
        """Raises UnusableError if the manager cannot grade a plainly wrong answer. Each row's first case is `PLAIN`."""
        gold = str(case.row["ground_truth"])
        if case.answer is PLAIN:
            if graded.failure:
                raise UnusableError(f"a plain wrong answer to {gold[:80]!r} is not graded: {graded.failure}")
            self._least, self._most = graded.score, -math.inf
        if case.answer.name == RIGHT:
            self.paid |= graded.acc > 0.5
            self._most = max(self._most, graded.score)
        elif graded.failure:
            attack = Attack(f"{case.answer.name} ({graded.failure[:80]})", case.answer.segments)
            self.found.append(Finding(attack, gold, graded.score))
        elif graded.acc > 0.5 or (graded.score > self._least and not graded.partial):
            self.found.append(Finding(case.answer, gold, graded.score))
        elif graded.score > self._least:
            self._add_credit(case, graded.score)
        self.hangs += graded.failure.startswith("hangs")

    def _add_credit(self, case: Case, score: float) -> None:
        """A score between those of wrong and right answers."""
        if score >= self._most:
            self.found.append(Finding(case.answer, str(case.row["ground_truth"]), score))
        else:
            share = (score - self._least) / (self._most - self._least)
            self.credit = max(self.credit, (share, case.answer.name))


def cases_of(rows: list[dict[str, Any]], every: int = 1) -> list[Case]:
    """All attacks on all rows, or one in `every`."""
    cases = []
    for row in rows:
        gold = row.get("answer") or golden_text(row["ground_truth"])
        code = "answer" in row or row.get("ability") == "code"
        right = [Attack(RIGHT, (("model", form.format(gold)),)) for form in FORMS.values()]
        attacks = attacks_on(row["ground_truth"], row.get("answer"), code, row.get("ability") == "sql")[::every]
        cases += [Case(row, attack) for attack in (PLAIN, *right, *attacks)]
    return cases


def table_of(found: list[Finding]) -> Table:
    """The false positives, with the input that made each."""
    table = Table("attack", "ground truth", "score", "input", title=f"{len(found)} false positives")
    for finding in found:
        text = " ".join(f"[{author}] {text}" for author, text in finding.attack.segments)
        table.add_row(finding.attack.name, repr(finding.ground_truth[:40]), f"{finding.score:g}", repr(text[:160]))
    return table


def report_on(
    manager: str, options: Mapping[str, Any], rows: list[dict[str, Any]], seconds: float, console: Console
) -> Report:
    """All attacks on all rows. Raises UnusableError."""
    cases, report = cases_of(rows), Report()
    graded = graded_in_child(manager, options, cases, seconds)
    for case, result in zip(cases, track(graded, total=len(cases), console=console, transient=True), strict=False):
        report.add(case, result)
        if report.hangs == MOST_HANGS:
            break
    return report


def main(
    manager: Annotated[str, typer.Argument(help="A name, or the path of a .py file with one reward manager.")],
    data: Annotated[Path | None, typer.Option(help="Rows with a reward_model, .parquet or .jsonl.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of it.")] = 3,
    option: Annotated[list[str] | None, typer.Option(help="An option of the manager, name=value.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For one attack; more is a hang.")] = SECONDS,
) -> None:
    """Attack a reward manager with wrong answers."""
    console = Console(soft_wrap=False)
    try:
        rows = SAMPLES.get(manager, DEFAULT) if data is None else read_rows(data, limit)
        report = report_on(manager, options_of(option or []), rows, seconds, console)
    except UnusableError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    if report.hangs == MOST_HANGS:
        console.print(f"stopped: it hangs on {MOST_HANGS} attacks")
    elif not report.paid:
        console.print("the golden answer was never taken for right: other rows (--data) may tell more")
    if report.credit[0]:
        console.print(f"partial credit: up to {report.credit[0]:.2g} of a right answer's ({report.credit[1]})")
    if report.found:
        console.print(table_of(report.found), markup=False)
        raise typer.Exit(1)
    console.print(f"{manager}: no false positive on {len(rows)} rows")
