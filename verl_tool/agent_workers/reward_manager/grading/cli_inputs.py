"""Read the rows and options of the commands `redteam` and `grade`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_tool.agent_workers.reward_manager.grading.manager_process import UnusableError


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first `limit` rows of a ``.parquet`` file, or of a file with one JSON object per line.

    Each row has ``ground_truth``, from the column of that name or from ``reward_model``, and the other columns. With
    `limit` None, all rows are read. Raises UnusableError that names the row.
    """
    rows = read_raw_rows(path)
    return [_with_ground_truth(row, f"{path}, row {number}") for number, row in enumerate(rows[:limit])]


def read_raw_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a ``.parquet`` file, or of a file with one JSON object per line, with their columns.

    Raises UnusableError that names the file, or the row.
    """
    if not path.is_file():
        raise UnusableError(f"file {path} does not exist")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_json_lines(path)
    if not rows:
        raise UnusableError(f"{path} has no rows")
    return rows


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse a manager's options, each ``name=value``. ``a.b=1`` is ``{"a": {"b": 1}}``.

    A value is parsed as JSON, and is a string if it is not JSON. Raises UnusableError.
    """
    options: dict[str, Any] = {}
    for option in texts:
        name, sign, text = option.partition("=")
        if not sign:
            raise UnusableError(f"--option {option}: write name=value")
        *groups, last = name.split(".")
        place = options
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise UnusableError(f"--option {option}: {group} has a value already")
        try:
            place[last] = json.loads(text)
        except ValueError:
            place[last] = text
    return options


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pandas as pd

    try:
        return [{str(k): v for k, v in row.items()} for row in pd.read_parquet(path).to_dict("records")]
    except (ValueError, OSError) as error:  # pyarrow's errors are both
        raise UnusableError(f"{path} cannot be read as Parquet: {error}") from error


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(line for line in path.read_text("utf-8").splitlines() if line.strip()):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UnusableError(f"{path}, row {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UnusableError(f"{path}, row {number} is a {type(row).__name__}; it must be an object")
        rows.append(row)
    return rows


def _with_ground_truth(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields = dict(row)
    graded_by = fields.pop("reward_model", None)
    if isinstance(graded_by, Mapping) and "ground_truth" in graded_by:
        return fields | {"ground_truth": graded_by["ground_truth"]}
    if graded_by is not None:
        raise UnusableError(f"{where}: reward_model must have a ground_truth; it is {graded_by!r:.80}")
    if "ground_truth" not in fields:
        raise UnusableError(f"{where} has neither reward_model nor ground_truth; it has: {', '.join(fields)}")
    return fields
