"""``python -m eval_service.compare A B``: what two evaluations of the same problems say of each other.

    python -m eval_service.compare outputs/evaluation/before outputs/evaluation/after

A and B are folders of ``eval_service.evaluate``, or their records.jsonl. The difference is B minus A, problem by
problem, with its 95% interval; the problems that only one of the two solves are listed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval_service.evaluation.comparison import Comparison, Difference, Flip, compare, read_evaluation
from verl_tool.errors import VerlToolError
from verl_tool.util.atomic_files import atomic_write
from verl_tool.util.command_line import run_command

console = Console(stderr=True)
EXCERPT = 60


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder or records.jsonl of an evaluation.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same of another one.")],
    show: Annotated[int, typer.Option("--show", min=0, help="Flipped problems of each kind that are listed.")] = 10,
    out: Annotated[Path | None, typer.Option("--out", help="A file for everything, as JSON.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the bootstrap.")] = 0,
) -> None:
    """Compare two evaluations of the same problems."""
    try:
        comparison = compare(read_evaluation(first), read_evaluation(second), seed=seed)
    except VerlToolError as error:
        console.print(f"[bold red]cannot compare:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    page = Console()
    page.print(figures(comparison), markup=False)
    for remark in comparison.remarks:
        page.print(f"note: {remark}", markup=False, highlight=False, soft_wrap=True)
    for title, flips in (("only B solves", comparison.solved), ("only A solves", comparison.lost)):
        if flips and show:
            page.print(flipped(f"{title}: {len(flips)} problems", flips[:show]), markup=False)
    if out is not None:
        with atomic_write(out) as draft:
            draft.write_text(json.dumps(asdict(comparison), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def figures(comparison: Comparison) -> Table:
    """A and B, their difference, its interval, and the test."""
    table = Table("", "A", "B", "B - A (95% interval)", "p", title=f"A: {comparison.first}\nB: {comparison.second}")
    shares = (f"{comparison.first_accuracy:.1%}", f"{comparison.second_accuracy:.1%}")
    table.add_row("right answers", *shares, _interval(comparison.accuracy, "+.1%"), _p(comparison.accuracy))
    if comparison.score is not None:
        table.add_row("reward", "", "", _interval(comparison.score, "+.4f"), _p(comparison.score))
    table.add_row("problems", str(comparison.problems), str(comparison.problems))
    table.add_row("only one solves", str(len(comparison.lost)), str(len(comparison.solved)))
    if comparison.left_out:
        table.add_row("left out: no score in one", str(comparison.left_out), str(comparison.left_out))
    return table


def flipped(title: str, flips: Sequence[Flip]) -> Table:
    """Problems with both answers."""
    table = Table("row", "A", "B", "the question ends in", "A's answer", "B's answer", title=title)
    for flip in flips:
        texts = (flip.question, flip.first_answer, flip.second_answer)
        table.add_row(str(flip.index), f"{flip.first:.0%}", f"{flip.second:.0%}", *map(_excerpt, texts))
    return table


def _interval(difference: Difference, form: str) -> str:
    return f"{difference.value:{form}} [{difference.low:{form}}, {difference.high:{form}}]"


def _p(difference: Difference) -> str:
    return f"{difference.p:.2g} ({difference.test})"


def _excerpt(text: str) -> str:
    return repr(text[-EXCERPT:])[1:-1]


if __name__ == "__main__":
    run_command(command)
