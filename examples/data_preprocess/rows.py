"""From a source's rows to verl's: loading, the split between training and test, and saving. Shared by the scripts here.

A row of verl's has `data_source`, `prompt` (a list of `{role, content}`), `ability`, `reward_model` (`style`,
`ground_truth`) and `extra_info` (`split`, `index`, and what the source adds); verl-tool reads `agent_name` and
`use_tool` besides. `ground_truth` and `extra_info` stay with the trainer: neither is ever sent to a tool, but for what
`extra_info` has as `tools_kwargs`, and a ground truth that is a verifier, which is run when a trajectory is over.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import datasets
import pandas as pd
import typer
from rich.console import Console
from tqdm import tqdm

from verl_tool.errors import VerlToolError

AGENT_NAME = "verltool_agent"
"""The agent loop, as verl_tool/trainer/config/agent_loops.yaml names it."""
WITHOUT_TOOL = "without_tool"
"""A split, and what is added to its data source: its scores are told apart."""
SAMPLES = Path(__file__).parent / "samples"
"""A few hand-made rows in each source's own schema."""

Row = dict[str, Any]
AsRow = Callable[[Mapping[str, Any], str, int], Row]
"""Takes a source's row, the split and the index in the split."""

LocalDir = Annotated[Path, typer.Option("--local_dir", help="Where train.parquet and test.parquet go.")]
DatasetPath = Annotated[
    str, typer.Option("--dataset_path", help="Hub name, or a local .parquet or .jsonl file or a folder of them.")
]
TestSize = Annotated[int, typer.Option("--test_size", min=0, help="Rows held out for the test split.")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same split.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Read only the first N rows of the source.")]

_SHOWN_LINE = 2000
"""Characters of a line of the example that is printed: a row may hold packed files."""
_KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


class RowError(ValueError):
    """A row of the source lacks a field, or a field holds what it should not."""


def run(main: Callable[..., None]) -> None:
    """Run a script's `main` with the arguments of the command line. What it cannot do is one line, and exit code 1."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except (ValueError, OSError, VerlToolError) as error:  # a `RowError` is a ValueError
        sys.exit(f"error: {error}")


def row(
    data_source: str,
    messages: Sequence[Mapping[str, str]],
    ability: str,
    ground_truth: str,
    split: str,
    index: int,
    extra_info: Mapping[str, Any] | None = None,
    use_tool: bool = True,
) -> Row:
    """One row of verl's."""
    return {
        "data_source": data_source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **(extra_info or {})},
        "agent_name": AGENT_NAME,
        "use_tool": use_tool,
    }


def messages(system: str | None, user: str) -> list[dict[str, str]]:
    """A conversation that waits for its first answer."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": user}]


def load(path: str, split: str = "train", name: str | None = None, limit: int | None = None) -> datasets.Dataset:
    """The rows of a source.

    `path`: a ``.parquet`` or ``.jsonl`` file; a folder, of which the files that begin with `split` are read, or all if
    none does; else a name on the hub, of which `name` picks a configuration. `limit`: only the first rows.
    Raises FileNotFoundError if a folder holds no such file.
    """
    local = Path(path)
    if local.exists():
        files = [local] if local.is_file() else _files_in(local, split)
        kind = _kind_of(files[0])
        found = datasets.load_dataset(kind, data_files=[str(file) for file in files], split="train")
    else:
        found = datasets.load_dataset(path, name, split=split)
    return found if limit is None else found.select(range(min(limit, len(found))))


def has_split(path: str, split: str) -> bool:
    """Whether a local folder has files of its own for the split; a hub data set is taken to have it."""
    local = Path(path)
    return not local.exists() or (local.is_dir() and any(file.name.startswith(split) for file in local.iterdir()))


def field(source: Mapping[str, Any], name: str, index: int, *kinds: type) -> Any:
    """A field of a source's row, of one of `kinds` (a string, if none is given).

    Raises RowError if it is missing, empty or of another kind.
    """
    value = source.get(name)
    if value is None:
        raise RowError(f"row {index} has no field {name!r}; it has: {', '.join(sorted(source))}")
    if not isinstance(value, kinds or str):
        wanted = " or ".join(kind.__name__ for kind in kinds or (str,))
        raise RowError(f"row {index}: field {name!r} is a {type(value).__name__}; it must be a {wanted}")
    if value in ("", []):
        raise RowError(f"row {index}: field {name!r} is empty")
    return value


def read_all(
    source: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any], int], Mapping[str, Any]], skip: bool
) -> list[Mapping[str, Any]]:
    """Return the rows that can be read; print how many cannot, and the first reasons. Raises RowError if not `skip`."""
    found, reasons = [], Counter[str]()
    for index, each in enumerate(tqdm(source, unit="row", disable=None)):
        try:
            found.append(read(each, index))
        except RowError as error:
            if not skip:
                raise
            reasons[str(error).partition(": ")[2][:160] or str(error)] += 1
    if reasons:
        typer.echo(f"{sum(reasons.values())} of {len(source)} rows are left out:")
        for reason, count in reasons.most_common(10):
            typer.echo(f"  {count}: {reason}")
    return found


def divide(
    source: Iterable[Mapping[str, Any]], key: str, test_size: int, seed: int
) -> dict[str, list[Mapping[str, Any]]]:
    """Train and test rows. Which row is held out depends on the text of its field `key` and on `seed`, not on the order
    of the rows; rows with the same text stay together.

    Raises RowError if a row lacks the field, ValueError if nothing is left for training.
    """
    ranked = sorted(
        ((_rank(field(row, key, i), seed), i, row) for i, row in enumerate(source)), key=lambda entry: entry[:2]
    )
    end = min(test_size, len(ranked))
    while 0 < end < len(ranked) and ranked[end][0] == ranked[end - 1][0]:
        end += 1
    if end >= len(ranked):
        raise ValueError(f"{len(ranked)} rows leave none for training at --test_size {test_size}; make it smaller")
    return {"train": _in_order(ranked[end:]), "test": _in_order(ranked[:end])}


def convert(splits: Mapping[str, Iterable[Mapping[str, Any]]], as_row: AsRow) -> dict[str, list[Row]]:
    """verl's rows of each split that has any. Raises RowError."""
    rows = {split: [as_row(row, split, i) for i, row in enumerate(part)] for split, part in splits.items()}
    return {split: part for split, part in rows.items() if part}


def rows_without_tool(test: Iterable[Mapping[str, Any]], as_row: AsRow, data_source: str) -> dict[str, list[Row]]:
    """The test rows once more, as the split `WITHOUT_TOOL`: `as_row` makes them for a model that has no tool, and
    `data_source` gives them a score of their own. Raises RowError."""
    again = convert({WITHOUT_TOOL: test}, as_row)
    return {split: [row | {"data_source": data_source} for row in part] for split, part in again.items()}


def save(splits: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> dict[str, Path]:
    """Write ``<folder>/<split>.parquet`` for each split; print the counts and one example. Returns the paths.

    Raises ValueError if a split is empty.
    """
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"split {split!r} has no rows; nothing was written for it")
        paths[split] = folder / f"{split}.parquet"
        pd.DataFrame(list(rows)).to_parquet(paths[split])
        console.print(f"{split}: {len(rows)} rows -> {paths[split]}")
    first = next(iter(splits.values()))[0]
    lines = json.dumps(first, indent=2, default=str).splitlines()
    shown = "\n".join(line if len(line) <= _SHOWN_LINE else f"{line[:_SHOWN_LINE]}..." for line in lines)
    console.print("one example:", shown, highlight=False, markup=False)
    return paths


def _files_in(folder: Path, split: str) -> list[Path]:
    """Files of one kind, wherever they lie below the folder."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in _KINDS)
    if not files:
        raise FileNotFoundError(f"{folder} holds no .parquet or .jsonl file")
    files = [file for file in files if file.name.startswith(split)] or files
    return [file for file in files if _kind_of(file) == _kind_of(files[0])]


def _kind_of(file: Path) -> str:
    if file.suffix not in _KINDS:
        raise ValueError(f"{file} is of no known kind; known: {', '.join(_KINDS)}")
    return _KINDS[file.suffix]


def _rank(text: Any, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _in_order(ranked: Sequence[tuple[str, int, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [row for _, _, row in sorted(ranked, key=lambda entry: entry[1])]
