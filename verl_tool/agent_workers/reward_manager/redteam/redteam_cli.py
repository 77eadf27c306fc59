"""Attacks a reward manager with answers that are wrong, and tells which of them it takes for right.

    python -m verl_tool.agent_workers.reward_manager.redteam gsm8k
    python -m verl_tool.agent_workers.reward_manager.redteam mine.py --data rows.parquet
    python -m verl_tool.agent_workers.reward_manager.redteam mine.py --data rows.parquet --form 'Answer: {}'
    python -m verl_tool.agent_workers.reward_manager.redteam acecoder --option server_url=http://127.0.0.1:5000

Answers are written in the forms of the managers here, and in those that the manager's file or the rows suggest and that
it accepts with the gold answer; --form names others.

A false positive is a wrong answer with `acc` 1, with a score above that of "I do not know.", with a fault, which
excuses it, or one on which the manager hangs or crashes. A manager may declare that it gives partial credit: then a
score that reaches a right answer's counts, and the highest one below is told. Exit code 0: none; 1: some, or a gold
answer that is accepted in no form; 2: the manager or its data cannot be used.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from verl_tool.agent_workers.reward_manager.grading.cli_inputs import parse_options, read_rows
from verl_tool.agent_workers.reward_manager.grading.manager_process import (
    GradedCase,
    GradingCase,
    ManagerAnswer,
    UnusableError,
    graded_in_child,
)
from verl_tool.agent_workers.reward_manager.redteam.answer_forms import candidate_forms, read_form
from verl_tool.agent_workers.reward_manager.redteam.attacks import FORMS, Attack, attacks_on, golden_text

SECONDS = 120.0
"""For one attack; a manager's own deadlines are shorter."""
MAX_HANGS = 3
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
class RedTeamFinding:
    attack: ManagerAnswer
    ground_truth: str
    score: float


@dataclass
class RedTeamReport:
    found: list[RedTeamFinding] = field(default_factory=list)
    forms: Mapping[str, str] = field(default_factory=lambda: FORMS)
    accepted: set[str] = field(default_factory=set)
    """Gold answers that were taken for right, in any form."""
    golds: set[str] = field(default_factory=set)
    hangs: int = 0
    credit: tuple[float, str] = (0.0, "")
    """The highest partial credit that a wrong answer got, as a share of a right one's, and the attack."""
    _min_score: float = 0.0
    _max_score: float = -math.inf

    def add(self, case: GradingCase, graded: GradedCase) -> None:
        """Raises UnusableError if the manager cannot grade a plainly wrong answer. Each row's first case is `PLAIN`."""
        gold = str(case.row["ground_truth"])
        self.golds.add(gold)
        if case.answer is PLAIN:
            if graded.failure:
                raise UnusableError(f"a plain wrong answer to {gold[:80]!r} is not graded: {graded.failure}")
            self._min_score, self._max_score = graded.score, -math.inf
        if case.answer.name == RIGHT:
            if graded.acc > 0.5:
                self.accepted.add(gold)
            self._max_score = max(self._max_score, graded.score)
        elif graded.failure:
            attack = Attack(f"{case.answer.name} ({graded.failure[:80]})", case.answer.segments)
            self.found.append(RedTeamFinding(attack, gold, graded.score))
        elif graded.acc > 0.5 or (graded.score > self._min_score and not graded.partial):
            self.found.append(RedTeamFinding(case.answer, gold, graded.score))
        elif graded.score > self._min_score:
            self._add_credit(case, graded.score)
        self.hangs += graded.failure.startswith("hangs")

    def _add_credit(self, case: GradingCase, score: float) -> None:
        """A score between those of wrong and right answers."""
        if score >= self._max_score:
            self.found.append(RedTeamFinding(case.answer, str(case.row["ground_truth"]), score))
        else:
            share = (score - self._min_score) / (self._max_score - self._min_score)
            self.credit = max(self.credit, (share, case.answer.name))


def cases_of(rows: list[dict[str, Any]], every: int = 1, forms: Mapping[str, str] = FORMS) -> list[GradingCase]:
    """All attacks on all rows, or one in `every`."""
    cases = []
    for row in rows:
        code = "answer" in row or row.get("ability") == "code"
        sql = row.get("ability") == "sql"
        attacks = attacks_on(row["ground_truth"], row.get("answer"), code, sql, forms)[::every]
        cases += [GradingCase(row, attack) for attack in (PLAIN, *_right(row, forms), *attacks)]
    return cases


def _right(row: Mapping[str, Any], forms: Mapping[str, str]) -> list[Attack]:
    gold = row.get("answer") or golden_text(row["ground_truth"])
    return [Attack(RIGHT, (("model", form.format(gold)),)) for form in forms.values()]


def kind_of(finding: RedTeamFinding) -> str:
    """What findings are grouped by: the attack without its form and details."""
    name, _, failure = finding.attack.name.partition(" (")
    kind = re.split(r": | by '", name)[0]
    return f"{kind} ({failure.partition(':')[0]})" if failure else kind


def table_of(found: list[RedTeamFinding]) -> Table:
    """The false positives by kind, each with the first of its inputs."""
    kinds: dict[str, list[RedTeamFinding]] = defaultdict(list)
    for finding in found:
        kinds[kind_of(finding)].append(finding)
    title = f"{len(found)} false positives of {len(kinds)} kinds"
    table = Table("kind", "findings", "such as", "ground truth", "score", "input", title=title)
    for kind, findings in sorted(kinds.items(), key=lambda item: -len(item[1])):
        table.add_row(kind, str(len(findings)), *_cells(findings[0]))
    return table


def table_of_all(found: list[RedTeamFinding]) -> Table:
    table = Table("attack", "ground truth", "score", "input")
    for finding in found:
        table.add_row(*_cells(finding))
    return table


def _cells(finding: RedTeamFinding) -> tuple[str, str, str, str]:
    text = " ".join(f"[{author}] {text}" for author, text in finding.attack.segments)
    return finding.attack.name, repr(finding.ground_truth[:40]), f"{finding.score:g}", repr(text[:160])


def accepted_forms(
    manager: str, options: Mapping[str, Any], rows: list[dict[str, Any]], seconds: float, given: Sequence[str]
) -> dict[str, str]:
    """The forms to attack in: those given, else `FORMS` and what the manager accepts of `candidate_forms`.

    `FORMS` are left out where the manager accepts the gold answers in none of them, but in others. Raises
    UnusableError.
    """
    if given:
        return {text: read_form(text) for text in given} | {"bare": FORMS["bare"]}
    forms = FORMS | {form: form for form in candidate_forms(manager, rows) if form not in FORMS.values()}
    if len(forms) == len(FORMS):
        return FORMS
    cases = [(name, GradingCase(row, *_right(row, {name: form}))) for name, form in forms.items() for row in rows]
    graded = graded_in_child(manager, options, [case for _, case in cases], seconds)
    accepted = {name for (name, _), each in zip(cases, graded, strict=False) if each.acc > 0.5 and not each.failure}
    found = {name: form for name, form in forms.items() if name in accepted and name not in FORMS}
    return (FORMS | found) if accepted & FORMS.keys() or not found else (found | {"bare": FORMS["bare"]})


def report_on(
    manager: str,
    options: Mapping[str, Any],
    rows: list[dict[str, Any]],
    seconds: float,
    console: Console,
    given: Sequence[str] = (),
) -> RedTeamReport:
    """All attacks on all rows; `given`: forms of the answer. Raises UnusableError."""
    forms = accepted_forms(manager, options, rows, seconds, given)
    cases, report = cases_of(rows, forms=forms), RedTeamReport(forms=forms)
    graded = graded_in_child(manager, options, cases, seconds)
    for case, result in zip(cases, track(graded, total=len(cases), console=console, transient=True), strict=False):
        report.add(case, result)
        if report.hangs == MAX_HANGS:
            break
    return report


def main(
    manager: Annotated[str, typer.Argument(help="A name, or the path of a .py file with one reward manager.")],
    data: Annotated[Path | None, typer.Option(help="Rows with a reward_model, .parquet or .jsonl.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of it.")] = 3,
    option: Annotated[list[str] | None, typer.Option(help="An option of the manager, name=value.")] = None,
    form: Annotated[
        list[str] | None, typer.Option(help="How an answer is written, with {} for it, such as 'Answer: {}'.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For one attack; more is a hang.")] = SECONDS,
    every: Annotated[bool, typer.Option("--all", help="List every false positive, not one of each kind.")] = False,
) -> None:
    """Attack a reward manager with wrong answers."""
    console = Console(soft_wrap=False)
    try:
        rows = SAMPLES.get(manager, DEFAULT) if data is None else read_rows(data, limit)
        report = report_on(manager, parse_options(option or []), rows, seconds, console, form or ())
    except UnusableError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    page = Console(soft_wrap=True, highlight=False)
    if others := [repr(name) for name in report.forms if name not in FORMS]:
        page.print(f"forms of the answer: {', '.join(others)}", markup=False)
    if report.hangs == MAX_HANGS:
        page.print(f"stopped: it hangs on {MAX_HANGS} attacks")
    if report.credit[0]:
        page.print(f"partial credit: up to {report.credit[0]:.2g} of a right answer's ({report.credit[1]})")
    if report.found:
        console.print(table_of_all(report.found) if every else table_of(report.found), markup=False)
    unpaid = sorted(report.golds - report.accepted)
    # Of the rows here not each need suit a manager of one's own.
    not_accepted = bool(unpaid) and report.hangs < MAX_HANGS and (data is not None or not report.accepted)
    if not_accepted:
        tried = ", ".join(repr(each) for each in report.forms.values())
        page.print(
            f"the gold answer of {len(unpaid)} of {len(report.golds)} rows, such as {unpaid[0][:80]!r}, is accepted "
            f"in no form that was tried ({tried}), so that nothing is known about these rows: say how an answer is "
            "written, --form 'Answer: {}', or correct the manager or the rows",
            markup=False,
        )
    if report.found or not_accepted:
        raise typer.Exit(1)
    console.print(f"{manager}: no false positive on {len(rows)} rows")
