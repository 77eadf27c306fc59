"""``python -m verl_tool.replay``: the trajectories of a run, scored again or with their calls run again.

    python -m verl_tool.replay outputs/calculator/grpo --regrade
    python -m verl_tool.replay outputs/calculator/grpo --regrade --reward_manager mine.py
    python -m verl_tool.replay outputs/evaluation/test --regrade --from_run outputs/calculator/grpo --data test.parquet

Exit code 0: nothing changed but what was asked for; 1: something did; 2: the run cannot be replayed.
"""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from verl_tool.errors import ConfigError, VerlToolError

if TYPE_CHECKING:
    from verl_tool.replay.regrade import Difference, Report

console = Console(stderr=True)


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a training, or of an evaluation (records.jsonl).")],
    regrade: Annotated[bool, typer.Option("--regrade", help="Score every stored trajectory again.")] = False,
    reward_manager: Annotated[
        str | None,
        typer.Option("--reward_manager", help="In place of the run's: a name, or a .py file with one."),
    ] = None,
    reward_kwargs: Annotated[
        str, typer.Option("--reward_kwargs", help="Options of the reward manager, as JSON; over the run's own.")
    ] = "{}",
    from_run: Annotated[
        Path | None, typer.Option("--from_run", help="Of an evaluation: the training whose reward it used.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="The rows, in place of those that the run's config names.")
    ] = None,
    files: Annotated[str, typer.Option("--files", help="Only files of such names, as 'validation_*'.")] = "*",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many trajectories.")] = None,
    tool_server_url: Annotated[
        str | None, typer.Option("--tool_server_url", help="Where a reward runs code. That of the run is gone.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the differences here, one in a line.")] = None,
    accept: Annotated[
        Path | None, typer.Option("--accept", help="Differences that are known, as --output writes them.")
    ] = None,
) -> None:
    """Do again what a run did, and tell what is different."""
    try:
        if not regrade:
            raise ConfigError("nothing to do; give --regrade")
        options = _json_object(reward_kwargs)
        report = _regraded(run, reward_manager, options, from_run, tuple(data or ()), files, limit, tool_server_url)
        unasked = _unasked(report, accept, asked=reward_manager is not None or bool(options))
    except VerlToolError as error:
        console.print(f"[bold red]cannot replay:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    if output is not None:
        output.write_text("".join(f"{each.to_json()}\n" for each in report.differences), encoding="utf-8")
    if report.differences:
        Console().print(report.table(), markup=False)
    Console().print(report.words(), highlight=False, soft_wrap=True)
    if report.without_row:
        Console().print(f"without a row in the data: {', '.join(report.without_row[:5])}", markup=False)
    if unasked or report.without_row:
        raise typer.Exit(1)


def _regraded(
    run: Path,
    manager: str | None,
    options: dict[str, Any],
    from_run: Path | None,
    data: tuple[Path, ...],
    files: str,
    limit: int | None,
    tool_server_url: str | None,
) -> Report:
    # What follows imports verl, which takes seconds.
    from eval_service.evaluation.scoring import Scorer
    from verl_tool.replay.regrade import regrade, reward_of, tokenizer_of
    from verl_tool.replay.stored import StoredRun

    stored = StoredRun(run, data, files)
    trained = run if stored.config is not None else from_run
    reward = reward_of(trained or run, manager, options, tool_server_url, trained=trained is not None)
    scorer = Scorer(reward, tokenizer_of(trained) if trained is not None else None)
    shown = track(islice(stored, limit), description="grading", console=console, transient=True)
    return asyncio.run(regrade(shown, scorer))


def _unasked(report: Report, accept: Path | None, *, asked: bool) -> list[Difference]:
    """The differences that are neither the wanted effect of another reward nor known. Raises ConfigError."""
    known = set()
    for line in accept.read_text("utf-8").splitlines() if accept is not None else ():
        told = _json_object(line)
        known.add((told.get("where"), told.get("now")))
    new = [each for each in report.differences if (each.where, each.now.score) not in known]
    return [each for each in new if each.lost] if asked else new


def _json_object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text[:200]!r} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{text[:200]!r} is no JSON object")
    return content


def main() -> None:
    """Entry point."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()
