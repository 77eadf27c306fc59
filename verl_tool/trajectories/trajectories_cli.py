"""Stored trajectories into the forms of other projects, and back.

python -m verl_tool.trajectories convert outputs/calculator/grpo/trajectories/step_1.jsonl out/ --to atif
python -m verl_tool.trajectories convert harbor/trajectory.json mine.jsonl --to verl_tool
python -m verl_tool.trajectories harbor outputs/calculator/grpo jobs/
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.trajectories import atif, openai_messages, training_trace
from verl_tool.trajectories.files import FileForm, documents, trajectories_in
from verl_tool.trajectories.harbor_jobs import model_of, read_run, write_jobs
from verl_tool.trajectories.turns import Converted

console = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def group() -> None:
    """Stored trajectories."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A .jsonl or .json file, or a folder of them, as a run's.")],
    target: Annotated[Path, typer.Argument(help="A .jsonl file, one in a line; else a folder, one .json file each.")],
    to: Annotated[FileForm, typer.Option("--to", help="The form that is wanted.")],
    given: Annotated[
        FileForm | None, typer.Option("--from", help="The form of the source; default: as it looks.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Rows of a data set, whose messages --to openai then has.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many.")] = None,
) -> None:
    """Write trajectories in another form, and tell what it cannot carry."""
    lost: Counter[str] = Counter()
    try:
        if data and to is not FileForm.openai:
            raise ConfigError(f"--data brings the messages of prompts for --to openai; --to {to.value} needs none")
        found = _converted(source, given, _writer(to, tuple(data or ())), limit, lost)
        count = _write_lines(target, found) if target.suffix == ".jsonl" else _write_files(target, found)
        if not count:
            raise ConfigError(f"{source} holds no trajectory")
    except VerlToolError as error:
        console.print(f"[bold red]cannot convert:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    _report(count, target, lost)


@app.command()
def harbor(
    source: Annotated[Path, typer.Argument(help="A run's or an evaluation's folder, or a file of its trajectories.")],
    target: Annotated[Path, typer.Argument(help="Folder of jobs, for `harbor view`.")],
    name: Annotated[
        str | None, typer.Option("--name", help="First part of the jobs' names; default: that of the run's folder.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the model; default: as the run's folder says.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many.")] = None,
) -> None:
    """Write the trajectories of a run as jobs that Harbor's viewer opens: one for each file of the run."""
    lost: Counter[str] = Counter()
    try:
        folder = source if source.is_dir() else source.resolve().parent
        run = folder.resolve().parent if folder.resolve().name == "trajectories" else folder.resolve()
        trajectories = islice(read_run(source, lost), limit)
        found = track(trajectories, description="writing", total=None, console=console, transient=True)
        count = write_jobs(found, target, name or run.name, model or model_of(run), lost)
        if not count:
            raise ConfigError(f"{source} holds no trajectory")
    except (VerlToolError, OSError) as error:
        console.print(f"[bold red]cannot convert:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    _report(count, target, lost)


def _report(count: int, target: Path, lost: Counter[str]) -> None:
    page = Console()
    page.print(f"{count} trajectories written to {target}", highlight=False, soft_wrap=True)
    for words, times in lost.most_common():
        page.print(f"not carried: {words} ({times} of {count})", highlight=False, markup=False, soft_wrap=True)


def _writer(to: FileForm, data: tuple[Path, ...]) -> Callable[[Trajectory], Converted]:
    if to is FileForm.verl_tool:
        return lambda trajectory: Converted(json.loads(trajectory.to_json()))
    if to is FileForm.openai and data:
        from eval_service.evaluation.dataset import read_problems
        from verl_tool.replay.rows import Rows

        rows = Rows([row for path in data for row in read_problems(path)])

        def with_messages(trajectory: Trajectory) -> Converted:
            row = rows.match(trajectory)
            return openai_messages.write(trajectory, None if row is None else row.messages)

        return with_messages
    return {FileForm.atif: atif.write, FileForm.openenv: training_trace.write, FileForm.openai: openai_messages.write}[
        to
    ]


def _converted(
    source: Path,
    given: FileForm | None,
    write: Callable[[Trajectory], Converted],
    limit: int | None,
    lost: Counter[str],
) -> Iterator[tuple[str, Any]]:
    """The id of each trajectory, and its document; what is `lost` is counted. Raises ConfigError that tells where."""
    for number, (where, document) in enumerate(documents(source)):
        if number == limit:
            return
        try:
            read = trajectories_in(document, given)
            if read is None:
                lost["answers without a trajectory"] += 1
                continue
            written = write(read.result)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        lost.update({*read.not_carried, *written.not_carried})
        yield read.result.trajectory_id, written.result


def _write_lines(path: Path, found: Iterator[tuple[str, Any]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for _, document in found:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_files(folder: Path, found: Iterator[tuple[str, Any]]) -> int:
    count = 0
    for count, (name, document) in enumerate(found, start=1):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{count:06}_{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:64]}.json"
        path.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
    return count
