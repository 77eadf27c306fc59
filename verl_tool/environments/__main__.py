"""``python -m verl_tool.environments check NAME`` plays one episode, ``rows NAME SOURCE`` makes training rows.
``serve PROTOCOL`` serves our tools to other systems (`served.serve_cli`).

Exit code 0: the episode was judged, or the rows are written; 1: it was not; 2: wrong usage.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from verl_tool.environments.episode_check import play_episode
from verl_tool.environments.served.serve_cli import add_commands
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.servers.tools import Tool, tool_class
from verl_tool.util.json_text import as_object

app = typer.Typer(add_completion=False, no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="An environment, as in --tool_type: a name, or the path of a .py file.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="NAME=VALUE, the value as JSON or text. Repeatable.")
]


@app.callback()
def _commands() -> None:
    """Environments in which trajectories take place."""


@app.command()
def check(
    name: Name,
    option: Options = None,
    arguments: Annotated[str, typer.Option(help="Arguments of the row, a JSON object.")] = "{}",
    truth: Annotated[str, typer.Option(help="What it judges by (the row's ground truth), a JSON object.")] = "{}",
    turn: Annotated[
        list[str] | None,
        typer.Option(help="A turn of the model. Repeatable. Default: one call of each tool, or a word."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Deadline of each step, seconds.")] = 60.0,
) -> None:
    """Play one episode, and print what the environment shows, answers and judges."""
    console = Console()
    with _reporting_errors(console):
        tool = _load_environment(name, _parse_options(option))
        sent, judged_by = _object(arguments, "--arguments"), _object(truth, "--truth")
        report = asyncio.run(play_episode(tool, sent, turn or (), judged_by, seconds))
        report.print(console)
        raise typer.Exit(0 if report.is_judged else 1)


@app.command()
def rows(
    name: Name,
    source: Annotated[str, typer.Argument(help="What rows are made of: a file, a URL or a name, as the docs say.")],
    output: Annotated[Path, typer.Option("--output", help="A .parquet or .jsonl file.")],
    option: Options = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows.")] = None,
) -> None:
    """Write training rows."""
    console = Console()
    with _reporting_errors(console):
        module = importlib.import_module(tool_class(name).__module__)
        read_rows = getattr(module, "read_rows", None)
        if read_rows is None:
            raise ConfigError(f"the environment {name} makes no rows; write them as assets/docs/environments.md says")
        if output.suffix not in (".parquet", ".jsonl"):
            raise ConfigError(f"--output is {output}; end it in .parquet or .jsonl")
        made = islice(read_rows(source, **_parse_options(option)), limit)
        count = write_rows(track(made, "rows", console=console), output)
        if not count:
            raise ConfigError(f"{source} gives no rows")
        console.print(f"{count} rows in {output}")


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows to a ``.parquet`` or ``.jsonl`` file and return their number.

    Objects that differ between rows are JSON in parquet: the arguments of the environment, and the ground truth.
    """
    written = [dict(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written))
    elif written:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ConfigError("a .parquet file needs pyarrow; pip install pyarrow, or write a .jsonl file") from None
        pq.write_table(pa.Table.from_pylist([_for_parquet(row) for row in written]), path)
    return len(written)


def _for_parquet(row: Mapping[str, Any]) -> dict[str, Any]:
    """Parquet gives all objects of a column the same keys."""
    extra = dict(row.get("extra_info") or {})
    kwargs = dict(extra.get("tools_kwargs") or {})
    if isinstance(kwargs.get("environment"), Mapping):
        kwargs["environment"] = json.dumps(kwargs["environment"], ensure_ascii=False)
    judged = dict(row.get("reward_model") or {})
    if isinstance(judged.get("ground_truth"), Mapping):
        judged["ground_truth"] = json.dumps(judged["ground_truth"], ensure_ascii=False)
    return {**row, "extra_info": {**extra, "tools_kwargs": kwargs}, "reward_model": judged}


def _load_environment(name: str, options: Mapping[str, Any]) -> Tool:
    kind = tool_class(name)
    if not kind.is_environment:
        raise ConfigError(f"{name} is a tool and no environment; python -m verl_tool.servers.tests has checks of tools")
    return kind(**options)


def _parse_options(values: Sequence[str] | None) -> dict[str, Any]:
    found = {}
    for value in values or ():
        name, separator, text = value.partition("=")
        if not separator:
            raise ConfigError(f"--option {value}: write NAME=VALUE")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def _object(text: str, option: str) -> dict[str, Any]:
    value = as_object(text)
    if value is None:
        raise ConfigError(f"{option} is {text[:80]!r}; write a JSON object")
    return value


@contextmanager
def _reporting_errors(console: Console) -> Iterator[None]:
    """Print a `VerlToolError` as one line and exit with 2."""
    try:
        yield
    except VerlToolError as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None


add_commands(app)

if __name__ == "__main__":
    app()
