"""Grade the answers in a file with a reward manager.

    python -m verl_tool.agent_workers.reward_manager.grade gsm8k --texts texts.jsonl
    python -m verl_tool.agent_workers.reward_manager.grade mine.py --texts texts.jsonl --option timeout_seconds=5

Each line of ``texts.jsonl`` has an answer, its ground truth, and the further columns that the manager reads, if any
(``data_source``, ``ability``, ``extra_info``):

    {"answer": "It is #### 72", "ground_truth": "72"}
    {"answer": [["model", "```python\\nprint(72)\\n```"], ["tool", "72"], ["model", "#### 72"]], "ground_truth": "72"}

A string is the only turn of the model. A list names the author of each segment. A ``.parquet`` file has the same
columns, or those of a recipe (``reward_model``) and ``answer``.

Exit code 0: all answers have a score. 1: some have none. 2: the manager or the file cannot be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_tool.agent_workers.reward_manager.grading.cli_inputs import parse_options, read_rows
from verl_tool.agent_workers.reward_manager.grading.manager_process import (
    GradedCase,
    GradingCase,
    ManagerAnswer,
    UnusableError,
    graded_in_child,
)

SECONDS = 120.0
"""Time limit of one answer. The deadlines of managers are shorter."""
MAX_DISPLAY_CHARACTERS = 60
_AUTHORS = ("model", "tool", "template")


def cases_in(path: Path) -> list[GradingCase]:
    """Make a case of each row of a file. Raises UnusableError."""
    cases = []
    for number, row in enumerate(read_rows(path)):
        where = f"{path}, row {number}"
        if "answer" not in row:
            raise UnusableError(f"{where} has no 'answer'; it has: {', '.join(row)}")
        cases.append(GradingCase(row, ManagerAnswer(str(number), _segments(row.pop("answer"), where))))
    return cases


def _segments(answer: Any, where: str) -> tuple[tuple[str, str], ...]:
    if isinstance(answer, str):
        return (("model", answer),)
    parts = list(answer) if isinstance(answer, Iterable) else []
    pairs = [tuple(part) if isinstance(part, Iterable) else () for part in parts]
    if not pairs or any(len(s) != 2 or s[0] not in _AUTHORS or not isinstance(s[1], str) for s in pairs):
        raise UnusableError(
            f"{where}: answer is {answer!r:.80}; it must be a text, or a list of [author, text] with an author of "
            f"{', '.join(_AUTHORS)}"
        )
    return tuple((str(author), text) for author, text in pairs)


def table_of(cases: Sequence[GradingCase], graded: Sequence[GradedCase]) -> Table:
    """Make a table with the score of each answer and the manager's other numbers, or the reason for no score."""
    names = list(dict.fromkeys(name for each in graded for name in each.extra if name != "acc"))
    table = Table("row", "answer", "ground truth", "score", "acc", *names)
    for case, each in zip(cases, graded, strict=True):
        text = " ".join(text for _, text in case.answer.segments)
        numbers = [_number(each.extra.get(name, math.nan)) for name in names]
        score = (each.failure, "") if each.failure else (_number(each.score), _number(each.acc))
        table.add_row(case.answer.name, *map(_short, (text, str(case.row["ground_truth"]))), *score, *numbers)
    return table


def _short(text: str) -> str:
    text, half = repr(text)[1:-1], MAX_DISPLAY_CHARACTERS // 2
    return text if len(text) <= MAX_DISPLAY_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:g}"


def _as_json(case: GradingCase, graded: GradedCase) -> str:
    fields: Mapping[str, Any] = {"row": int(case.answer.name), "score": None if graded.failure else graded.score}
    extra = {name: None if math.isnan(value) else value for name, value in graded.extra.items()}
    return json.dumps({**fields, "failure": graded.failure or None, **extra}, ensure_ascii=False)


def main(
    manager: Annotated[str, typer.Argument(help="A name, or the path of a .py file with one reward manager.")],
    texts: Annotated[Path, typer.Option(help="Rows with answer and ground_truth, .jsonl or .parquet.")],
    option: Annotated[list[str] | None, typer.Option(help="An option of the manager, name=value.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For one text; more is a hang.")] = SECONDS,
    output: Annotated[Path | None, typer.Option(help="Write the grades here too, a JSON object a line.")] = None,
) -> None:
    """Grade texts of one's own with a reward manager."""
    console = Console()
    try:
        cases = cases_in(texts)
        graded = list(graded_in_child(manager, parse_options(option or []), cases, seconds))
    except UnusableError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    if output is not None:
        output.write_text("".join(f"{_as_json(*each)}\n" for each in zip(cases, graded, strict=True)), "utf-8")
    console.print(table_of(cases, graded), markup=False)
    scores = [each.score for each in graded if not each.failure]
    right = sum(each.acc > 0.5 for each in graded if not each.failure)
    mean = f", mean score {sum(scores) / len(scores):g}" if scores else ""
    console.print(f"{len(cases)} texts: {len(scores)} with a score, {right} right{mean}", highlight=False)
    if len(scores) < len(cases):
        raise typer.Exit(1)
