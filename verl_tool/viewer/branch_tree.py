"""What went on from a trajectory (`python -m verl_tool.replay.branch`): a tree of branches, and values of turns."""

from __future__ import annotations

from typing import Any

import msgspec

from verl_tool.util.confined_files import read_confined
from verl_tool.viewer.record_index import Records
from verl_tool.viewer.record_query import row_as_json
from verl_tool.viewer.run_files import BRANCHES, Run

MAX_BRANCHES = 500
"""Branches that are told of a trajectory, those of its branches included."""
_MAX_VALUES_BYTES = 16 << 20
_TEXT = 400
"""Characters of an edit."""


class _Origin(msgspec.Struct):
    turn: int = 0
    edited: str | None = None
    text: str | None = None
    for_values: bool = False


class _Extra(msgspec.Struct):
    branch: _Origin = msgspec.field(default_factory=_Origin)


class _Line(msgspec.Struct):
    extra: _Extra = msgspec.field(default_factory=_Extra)


class _Mean(msgspec.Struct):
    value: float | None
    error: float | None


class _Turn(msgspec.Struct):
    turn: int
    samples: int
    score: _Mean
    success: _Mean


class _Values(msgspec.Struct):
    turns: list[_Turn]
    model: str = ""


def branches_of(records: Records, file: str, line: int) -> dict[str, Any]:
    """The branches of the trajectory at `line`, from 0, of a file: each with where it began, its row in short and its
    own ``branches``. ``total`` counts those that went on from the trajectory itself."""
    remaining = [MAX_BRANCHES]
    number = records.file_number(_name(file, line))
    return {
        "total": 0 if number is None else _rows(records, number)[1],
        "branches": _tree(records, file, line, remaining),
    }


def values_of(run: Run, file: str, line: int) -> list[dict[str, Any]]:
    """The values of a trajectory's turns, as far as they were estimated; none if nobody did, or not readable."""
    try:
        path = run.folder / BRANCHES / f"{_name(file, line)}.values.json"
        values = msgspec.json.decode(read_confined(path, run.folder, _MAX_VALUES_BYTES), type=_Values)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [msgspec.to_builtins(turn) for turn in values.turns]


def _tree(records: Records, file: str, line: int, room: list[int]) -> list[dict[str, Any]]:
    name = _name(file, line)
    number = records.file_number(name)
    if number is None:
        return []
    entries = []
    start, count = _rows(records, number)
    for place in range(count):
        if room[0] <= 0:
            break
        room[0] -= 1
        entry = _entry(records, start + place)
        entries.append({**entry, "branches": _tree(records, name, place, room)})
    return entries


def _entry(records: Records, number: int) -> dict[str, Any]:
    row = row_as_json(records, number)
    try:
        origin = msgspec.json.decode(records.line(records.rows[number]), type=_Line).extra.branch
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        origin = _Origin()
    values = {name: row[name] for name in ("file", "line", "reward", "correct", "stop", "fault", "turns", "answer")}
    edit = {"edited": origin.edited, "text": (origin.text or "")[:_TEXT], "for_values": origin.for_values}
    return {**values, "turn": origin.turn, **edit}


def _rows(records: Records, number: int) -> tuple[int, int]:
    """The first row of a file, and how many it has."""
    ends = [*records.starts[1:], len(records.rows)]
    return records.starts[number], ends[number] - records.starts[number]


def _name(file: str, line: int) -> str:
    """The file that holds the branches of a trajectory, without its ending: its lines are counted from 1 there."""
    return f"{file}.{line + 1}"
