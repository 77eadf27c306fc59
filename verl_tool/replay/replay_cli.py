"""``python -m verl_tool.replay``: what a run did, done again: scores, calls, an update; or compared with a run.

    python -m verl_tool.replay outputs/calculator/grpo --regrade
    python -m verl_tool.replay outputs/calculator/grpo --regrade --reward_manager mine.py
    python -m verl_tool.replay outputs/calculator/grpo --reexecute --files 'validation_*'
    python -m verl_tool.replay outputs/evaluation/test --regrade --from_run outputs/calculator/grpo --data test.parquet
    python -m verl_tool.replay outputs/calculator/grpo --retrain 1
    python -m verl_tool.replay outputs/calculator/grpo --same_as outputs/calculator/again

Exit code 0: nothing changed but what was asked for; 1: something did; 2: the run cannot be replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.replay.compare_runs import compare_runs
from verl_tool.util.json_options import json_object

if TYPE_CHECKING:
    from verl_tool.replay.stored import Stored, StoredRun

console = Console(stderr=True)


class Report(Protocol):
    """What doing it again has shown."""

    without_row: list[str]

    def words(self) -> str: ...

    def tables(self) -> list[Table]: ...

    def lines(self) -> list[str]: ...

    def unexpected_count(self, known: Collection[tuple[str, object]], *, asked: bool) -> int: ...


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a training, or of an evaluation (records.jsonl).")],
    regrade: Annotated[bool, typer.Option("--regrade", help="Score every stored trajectory again.")] = False,
    reexecute: Annotated[bool, typer.Option("--reexecute", help="Run every stored call again.")] = False,
    retrain: Annotated[
        int | None, typer.Option("--retrain", min=1, metavar="STEP", help="Make the update of this step again.")
    ] = None,
    same_as: Annotated[
        Path | None, typer.Option("--same_as", help="Compare the run with this one: all but times and ids.")
    ] = None,
    reward_manager: Annotated[
        str | None,
        typer.Option("--reward_manager", help="In place of the run's: a name, or a .py file with one."),
    ] = None,
    reward_kwargs: Annotated[
        str, typer.Option("--reward_kwargs", help="Options of the reward manager, as JSON; over the run's own.")
    ] = "{}",
    from_run: Annotated[
        Path | None, typer.Option("--from_run", help="Of an evaluation: the training whose reward and tools it used.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="The rows, in place of those that the run's config names.")
    ] = None,
    files: Annotated[str, typer.Option("--files", help="Only files of such names, as 'validation_*'.")] = "*",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many trajectories.")] = None,
    tool_server_url: Annotated[
        str | None,
        typer.Option("--tool_server_url", help="Where calls, or a reward, run. Default for calls: start the run's."),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option("--run_dir", help="Of --retrain: the folder of the training that makes the update.")
    ] = Path("outputs/replay/retrain"),
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Of --retrain: relative; near 0 a hundredth of it, absolute.")
    ] = 1e-3,
    output: Annotated[Path | None, typer.Option("--output", help="Write the differences here, one in a line.")] = None,
    accept: Annotated[
        Path | None, typer.Option("--accept", help="Differences that are known, as --output writes them.")
    ] = None,
) -> None:
    """Do again what a run did, and tell what is different."""
    try:
        if (regrade, reexecute, retrain is not None, same_as is not None).count(True) != 1:
            raise ConfigError("nothing to do; give one of --regrade, --reexecute, --retrain and --same_as")
        options, known = json_object(reward_kwargs, repr(reward_kwargs[:200])), _known(accept)
        report: Report
        if same_as is not None:
            report = compare_runs(run, same_as)
        elif retrain is not None:
            report = _retrained(run, retrain, run_dir, tolerance)
        else:
            from verl_tool.replay.stored import StoredRun  # what is imported here and below takes seconds

            stored = StoredRun(run, tuple(data or ()), files)
            trained = run if stored.config is not None else from_run
            if regrade:
                trajectories = _format(stored, limit, "grading")
                report = _regraded(trajectories, run, trained, reward_manager, options, tool_server_url)
            else:
                report = _reexecuted(_format(stored, limit, "calling"), trained, tool_server_url)
        _print(report)
        if output is not None:
            # Half a surrogate pair becomes the escape by which JSON spells it.
            lines = "".join(f"{line}\n" for line in report.lines())
            output.write_text(lines, encoding="utf-8", errors="backslashreplace")
    except (VerlToolError, OSError) as error:
        console.print(f"[bold red]cannot replay:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if report.unexpected_count(known, asked=reward_manager is not None or bool(options)):
        raise typer.Exit(1)


def _format(stored: StoredRun, limit: int | None, doing: str) -> Iterable[Stored]:
    return track(islice(stored, limit), description=doing, console=console, transient=True)


def _regraded(
    stored: Iterable[Stored],
    run: Path,
    trained: Path | None,
    manager: str | None,
    options: dict[str, Any],
    tool_server_url: str | None,
) -> Report:
    from eval_service.evaluation.scoring import Scorer
    from verl_tool.replay.regrade import regrade, reward_of, tokenizer_of

    reward = reward_of(trained or run, manager, options, tool_server_url, trained=trained is not None)
    scorer = Scorer(reward, tokenizer_of(trained) if trained is not None else None)
    return asyncio.run(regrade(stored, scorer))


def _reexecuted(stored: Iterable[Stored], trained: Path | None, tool_server_url: str | None) -> Report:
    from eval_service.model.run_config import run_config
    from verl_tool.agent_loop.options import EpisodeOptions
    from verl_tool.agent_loop.verl.config import options_in
    from verl_tool.replay.reexecute import reexecute
    from verl_tool.replay.server import served_tools, tool_server

    config = run_config(trained) if trained is not None else None
    options = options_in(config) if config is not None else EpisodeOptions(enable_mtrl=True)
    with tool_server(config, tool_server_url) as url:
        both = {False: options, True: options.for_validation()}
        return asyncio.run(reexecute(stored, url, served_tools(config), both))


def _retrained(run: Path, step: int, folder: Path, tolerance: float) -> Report:
    from verl_tool.replay.retrain import LOG, retrain

    with console.status(f"making step {step} again; all that is printed goes to {escape(str(folder / LOG))}"):
        return retrain(run, step, folder, tolerance)


def _print(report: Report) -> None:
    page = Console()
    for table in report.tables():
        page.print(table, markup=False)
    page.print(report.words(), highlight=False, soft_wrap=True)
    if report.without_row:
        page.print(f"without a row in the data: {', '.join(report.without_row[:5])}", markup=False)


def _known(accept: Path | None) -> set[tuple[str, object]]:
    """Where differences are known, and what is there now. Raises ConfigError for a line that is no difference."""
    lines = accept.read_text("utf-8").splitlines() if accept is not None else []
    differences = [json_object(line, repr(line[:200])) for line in lines if line.strip()]
    return {(str(each.get("where")), each.get("now")) for each in differences}
