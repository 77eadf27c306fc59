"""``python -m verl_tool.replay``: repeat scores, calls or an update of a run, or compare it with another run.

    python -m verl_tool.replay outputs/calculator/grpo --regrade
    python -m verl_tool.replay outputs/calculator/grpo --regrade --reward_manager mine.py
    python -m verl_tool.replay outputs/calculator/grpo --reexecute --files 'validation_*'
    python -m verl_tool.replay outputs/evaluation/test --regrade --from_run outputs/calculator/grpo --data test.parquet
    python -m verl_tool.replay outputs/calculator/grpo --retrain 1
    python -m verl_tool.replay outputs/calculator/grpo --same_as outputs/calculator/again

Exit code 0: nothing unexpected differs; 1: something differs; 2: the run cannot be replayed.
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
    from verl_tool.replay.stored import StoredAnswer, StoredRun

console = Console(stderr=True)


class Report(Protocol):
    """Result of a replay."""

    without_row: list[str]

    def summary(self) -> str: ...

    def tables(self) -> list[Table]: ...

    def lines(self) -> list[str]: ...

    def unexpected_count(self, known: Collection[tuple[str, object]], *, reward_changed: bool) -> int: ...


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, or of an evaluation (records.jsonl).")],
    regrade: Annotated[bool, typer.Option("--regrade", help="Grade every stored trajectory again.")] = False,
    reexecute: Annotated[bool, typer.Option("--reexecute", help="Run every stored call again.")] = False,
    retrain: Annotated[
        int | None, typer.Option("--retrain", min=1, metavar="STEP", help="Repeat the update of this step.")
    ] = None,
    same_as: Annotated[
        Path | None, typer.Option("--same_as", help="Compare with this run, except for times and ids.")
    ] = None,
    reward_manager: Annotated[
        str | None,
        typer.Option("--reward_manager", help="Replaces the run's: a name, or a .py file."),
    ] = None,
    reward_kwargs: Annotated[
        str, typer.Option("--reward_kwargs", help="Options of the reward manager as JSON; they override the run's.")
    ] = "{}",
    from_run: Annotated[
        Path | None, typer.Option("--from_run", help="Evaluation only: the training whose reward and tools it used.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Files of rows, instead of those in the run's config.")
    ] = None,
    files: Annotated[str, typer.Option("--files", help="Only files whose names match, such as 'validation_*'.")] = "*",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N trajectories.")] = None,
    tool_server_url: Annotated[
        str | None,
        typer.Option("--tool_server_url", help="Server of calls or a reward. Default for calls: start the run's."),
    ] = None,
    run_dir: Annotated[Path, typer.Option("--run_dir", help="For --retrain: folder for the new training.")] = Path(
        "outputs/replay/retrain"
    ),
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="For --retrain: relative; near 0, a hundredth, absolute.")
    ] = 1e-3,
    output: Annotated[Path | None, typer.Option("--output", help="Write the differences here, one per line.")] = None,
    accept: Annotated[
        Path | None, typer.Option("--accept", help="File of known differences, as --output writes it.")
    ] = None,
) -> None:
    """Repeat what a run did, and report what differs."""
    try:
        if (regrade, reexecute, retrain is not None, same_as is not None).count(True) != 1:
            raise ConfigError("nothing to do; give one of --regrade, --reexecute, --retrain and --same_as")
        options, known = json_object(reward_kwargs, repr(reward_kwargs[:200])), _read_known(accept)
        report: Report
        if same_as is not None:
            report = compare_runs(run, same_as)
        elif retrain is not None:
            report = _retrain(run, retrain, run_dir, tolerance)
        else:
            from verl_tool.replay.stored import StoredRun  # a slow import, as those below

            stored = StoredRun(run, tuple(data or ()), files)
            trained = run if stored.config is not None else from_run
            if regrade:
                trajectories = _track(stored, limit, "grading")
                report = _regrade(trajectories, run, trained, reward_manager, options, tool_server_url)
            else:
                report = _reexecute(_track(stored, limit, "calling"), trained, tool_server_url)
        _print(report)
        if output is not None:
            # A lone surrogate becomes its JSON escape.
            lines = "".join(f"{line}\n" for line in report.lines())
            output.write_text(lines, encoding="utf-8", errors="backslashreplace")
    except (VerlToolError, OSError) as error:
        console.print(f"[bold red]cannot replay:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if report.unexpected_count(known, reward_changed=reward_manager is not None or bool(options)):
        raise typer.Exit(1)


def _track(stored: StoredRun, limit: int | None, description: str) -> Iterable[StoredAnswer]:
    return track(islice(stored, limit), description=description, console=console, transient=True)


def _regrade(
    stored: Iterable[StoredAnswer],
    run: Path,
    trained: Path | None,
    manager: str | None,
    options: dict[str, Any],
    tool_server_url: str | None,
) -> Report:
    from eval_service.evaluation.scoring import Scorer
    from verl_tool.replay.regrade import load_reward_config, load_scoring_tokenizer, regrade

    reward = load_reward_config(trained or run, manager, options, tool_server_url, trained=trained is not None)
    scorer = Scorer(reward, load_scoring_tokenizer(trained) if trained is not None else None)
    return asyncio.run(regrade(stored, scorer))


def _reexecute(stored: Iterable[StoredAnswer], trained: Path | None, tool_server_url: str | None) -> Report:
    from eval_service.model.run_config import run_config
    from verl_tool.agent_loop.options import EpisodeOptions
    from verl_tool.agent_loop.verl.config import options_in
    from verl_tool.replay.reexecute import reexecute
    from verl_tool.replay.server import served_tools, tool_server

    config = run_config(trained) if trained is not None else None
    options = options_in(config) if config is not None else EpisodeOptions(enable_mtrl=True)
    with tool_server(config, tool_server_url) as url:
        by_split = {False: options, True: options.for_validation()}
        return asyncio.run(reexecute(stored, url, served_tools(config), by_split))


def _retrain(run: Path, step: int, folder: Path, tolerance: float) -> Report:
    from verl_tool.replay.retrain import LOG, retrain

    with console.status(f"repeating step {step}; its output goes to {escape(str(folder / LOG))}"):
        return retrain(run, step, folder, tolerance)


def _print(report: Report) -> None:
    page = Console()
    for table in report.tables():
        page.print(table, markup=False)
    page.print(report.summary(), highlight=False, soft_wrap=True)
    if report.without_row:
        page.print(f"no row in the data for: {', '.join(report.without_row[:5])}", markup=False)


def _read_known(accept: Path | None) -> set[tuple[str, object]]:
    """Return `where` and `now` of known differences. Raises ConfigError if a line is not a JSON object."""
    lines = accept.read_text("utf-8").splitlines() if accept is not None else []
    differences = [json_object(line, repr(line[:200])) for line in lines if line.strip()]
    return {(str(each.get("where")), each.get("now")) for each in differences}
