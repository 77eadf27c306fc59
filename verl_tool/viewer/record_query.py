"""Which rows of a run a table shows, in which order, and what is told of each."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_tool.errors import ConfigError
from verl_tool.viewer.record_index import MAX_LINE, Records
from verl_tool.viewer.record_rows import ROW, WORDS, texts_of

SEARCH_SECONDS = 8.0
"""After these a search for text tells what it has found so far."""
MAX_PAGE = 500
"""Rows of one answer."""
NUMBERS = tuple(name for name in ROW.names or () if name not in (*WORDS, "file", "offset", "length"))
"""Columns that rows are told, sorted and bounded by."""
_PREVIEW = 160
"""Characters of a text in a table."""
_ANY = "(any)"
_BINS = 24
_REMEMBERED = 32
"""Queries of one state of a run."""


@dataclass(frozen=True)
class Query:
    """What a table shows. Empty: no matter; branches are shown by their file or kind only."""

    files: tuple[str, ...] = ()
    kind: str = ""
    stop: str = ""
    tool: str = ""
    fault: str = ""
    """A cause, or ``(any)``."""
    excluded: str = ""
    bounds: tuple[tuple[str, float, float], ...] = ()
    """Column, least and most."""
    prompt: int | None = None
    text: str = ""
    sort: str = ""
    descending: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """What a request's query string asks for. Raises ConfigError that names what is wrong."""
        sort = given.get("sort", "")
        if sort and sort not in (*NUMBERS, *WORDS):
            raise ConfigError(f"sort={sort[:40]!r} is no column; known: {', '.join((*NUMBERS, *WORDS))}")
        bounds = []
        for name in NUMBERS:
            minimum, maximum = given.get(f"{name}_min", ""), given.get(f"{name}_max", "")
            if minimum or maximum:
                bounds.append((name, number(minimum or "-inf", name), number(maximum or "inf", name)))
        return cls(
            files=tuple(name for name in given.get("files", "").split(",") if name),
            **{name: given.get(name, "") for name in ("kind", "stop", "tool", "fault", "excluded")},
            bounds=tuple(bounds),
            prompt=whole_number(given["prompt"], "prompt") if given.get("prompt") else None,
            text=given.get("text", ""),
            sort=sort,
            descending=given.get("desc", "") == "1",
        )


@dataclass(frozen=True)
class QueryResult:
    """Numbers of rows, in order."""

    rows: np.ndarray
    searched: int
    """Of how many the text was looked for."""
    candidates: int


def find_rows(records: Records, query: Query) -> QueryResult:
    """The rows that a query asks for; scrolling asks the same again and again."""
    found: QueryResult | None = records.found.get(query)
    if found is None:
        if len(records.found) >= _REMEMBERED:
            records.found.clear()
        found = records.found[query] = _find_rows(records, query)
    return found


def _find_rows(records: Records, query: Query) -> QueryResult:
    rows = records.rows
    keep = np.ones(len(rows), dtype=bool)
    if query.files:
        numbers = [number for name in query.files if (number := records.file_number(name)) is not None]
        keep &= np.isin(rows["file"], numbers)
    for name in ("kind", "stop", "fault", "excluded"):
        word = getattr(query, name)
        if word:
            keep &= rows[name] != 0 if word == _ANY else rows[name] == _place(records, word)
    if not query.files and not query.kind:
        keep &= rows["kind"] != _place(records, "branch")  # they are no part of the training
    if query.tool:
        keep &= np.isin(rows["tools"], [i for i, word in enumerate(records.words) if query.tool in word.split(",")])
    for name, minimum, maximum in query.bounds:
        keep &= (rows[name] >= minimum) & (rows[name] <= maximum)
    if query.prompt is not None:
        keep &= rows["prompt"] == query.prompt
    found = np.flatnonzero(keep)
    candidates = searched = len(found)
    if query.text:
        found, searched = _with_text(records, found, query.text)
    return QueryResult(_sorted(records, found, query), searched, candidates)


def page(records: Records, query: Query, offset: int, limit: int) -> dict[str, Any]:
    """Rows from `offset` on, at most `limit`, with the first and last words of their texts."""
    found = find_rows(records, query)
    numbers = found.rows[max(0, offset) : max(0, offset) + min(limit, MAX_PAGE)]
    return {
        "total": len(found.rows),
        "searched": found.searched,
        "candidates": found.candidates,
        "offset": offset,
        "rows": [row_as_json(records, int(number)) for number in numbers],
    }


def row_as_json(records: Records, number: int, *, texts: bool = True) -> dict[str, Any]:
    """A row as JSON. `texts`: with the beginnings of its prompt's and its last turn's text."""
    row = records.rows[number]
    entry: dict[str, Any] = {"file": records.files[row["file"]].name, "row": number}
    for name in NUMBERS:
        value = row[name].item()
        entry[name] = None if isinstance(value, float) and math.isnan(value) else value
    entry |= {name: records.words[row[name]] for name in WORDS}
    if texts:
        prompt, _, last = texts_of(records.line(row))
        entry |= {"question": prompt[-4 * _PREVIEW :], "answer": last[-_PREVIEW:]}
    return entry


def neighbours(records: Records, query: Query, number: int) -> dict[str, Any]:
    """A row's place in the table of a query, and file and line of those before and behind it and of failures."""
    found = find_rows(records, query).rows
    at = np.flatnonzero(found == number)
    if not len(at):
        return {"place": None, "of": len(found), "previous": None, "next": None, "next_failure": None}
    place = int(at[0])
    behind = found[place + 1 :]
    failures = behind[failed(records.rows[behind])]
    return {
        "place": place,
        "of": len(found),
        "previous": _address(records, found[place - 1]) if place else None,
        "next": _address(records, behind[0]) if len(behind) else None,
        "next_failure": _address(records, failures[0]) if len(failures) else None,
    }


def failed(rows: np.ndarray) -> np.ndarray:
    """Which ended in a fault, were answered wrong, or, where that is unknown, had a call that failed."""
    wrong = np.where(np.isnan(rows["correct"]), rows["failed_calls"] > 0, rows["correct"] < 0.5)
    return (rows["fault"] != 0) | wrong


def _address(records: Records, number: np.int64) -> dict[str, Any]:
    row = records.rows[number]
    return {"file": records.files[row["file"]].name, "line": int(row["line"])}


def facets(records: Records, query: Query) -> dict[str, Any]:
    """How often each stop reason, tool, fault and reason of exclusion occurs in the query's files, and the rewards."""
    rows = records.rows[find_rows(records, Query(files=query.files, kind=query.kind)).rows]
    counted: dict[str, Any] = {}
    for name in WORDS:
        counts = np.bincount(rows[name], minlength=1)
        counted[name] = {records.words[i]: int(counts[i]) for i in np.argsort(-counts) if counts[i]}
    tools: dict[str, int] = {}
    for words, count in counted.pop("tools").items():
        for tool in words.split(",") if words else ():
            tools[tool] = tools.get(tool, 0) + count
    rewards = rows["reward"][np.isfinite(rows["reward"])]
    counts, edges = np.histogram(rewards, bins=_BINS) if len(rewards) else (np.zeros(0, int), np.zeros(0))
    histogram = {"counts": counts.tolist(), "edges": edges.tolist()}
    return {**counted, "tool": tools, "rewards": histogram, "failed": int(np.count_nonzero(rows["failed_calls"]))}


def by_file(records: Records) -> list[dict[str, Any]]:
    """Means of each file's rows, and its calls by tool."""
    entries = []
    ends = [*records.starts[1:], len(records.rows)]
    for number, (file, start, end) in enumerate(zip(records.files, records.starts, ends, strict=True)):
        if file.kind == "branch":
            continue
        rows = records.rows[start:end]
        means = {name: _mean(rows[name]) for name in ("reward", "correct", "turns", "calls", "model_tokens", "seconds")}
        tools = {name: vars(counts) for name, counts in records.tools[number].items()}
        faults = int(np.count_nonzero(rows["fault"]))
        entries.append(
            {"file": file.name, "kind": file.kind, "step": file.step, "rows": len(rows), "faults": faults}
            | {"means": means, "tools": tools}
        )
    return entries


def prompts(records: Records, kind: str, most: int = 100) -> dict[str, Any]:
    """Prompts that were sampled at more than one step: those whose mean reward differs most from first to last."""
    rows = records.rows
    usable = np.isfinite(rows["reward"]) & (rows["kind"] == _place(records, kind) if kind else rows["step"] >= 0)
    numbers = np.flatnonzero(usable)
    sampled = rows[numbers]
    order = np.lexsort((sampled["step"], sampled["prompt"]))
    numbers, sampled = numbers[order], sampled[order]
    # One entry for each prompt at each step, in this order.
    changes = (np.diff(sampled["prompt"]) != 0) | (np.diff(sampled["step"]) != 0)
    starts = np.flatnonzero(np.concatenate([[len(sampled) > 0], changes]))
    counts = np.diff(np.append(starts, len(sampled)))
    means = np.add.reduceat(sampled["reward"].astype("f8"), starts) / counts if len(starts) else np.zeros(0)
    firsts = np.flatnonzero(np.concatenate([[len(starts) > 0], np.diff(sampled["prompt"][starts]) != 0]))
    lasts = np.append(firsts[1:], len(starts)) - 1
    several = lasts > firsts
    firsts, lasts = firsts[several], lasts[several]
    changed = np.argsort(-np.abs(means[lasts] - means[firsts]), kind="stable")[:most]
    found = []
    for first, last in zip(firsts[changed], lasts[changed], strict=True):
        row = rows[numbers[starts[first]]]
        samples = int(counts[first : last + 1].sum())
        question = texts_of(records.line(row))[0][-4 * _PREVIEW :]
        found.append(
            {"prompt": int(row["prompt"]), "index": int(row["index"]), "steps": int(last - first + 1), "rows": samples}
            | {"first": float(means[first]), "last": float(means[last]), "question": question}
        )
    return {"kind": kind, "total": len(firsts), "prompts": found}


def number(text: str, name: str) -> float:
    """A number of a query string. Raises ConfigError."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text[:40]!r} is no number") from None


def whole_number(text: str, name: str) -> int:
    """A whole number of a query string. Raises ConfigError."""
    value = number(text, name)
    if not value.is_integer():
        raise ConfigError(f"{name}={text[:40]!r} is no whole number")
    return int(value)


def _place(records: Records, word: str) -> int:
    return records.words.index(word) if word in records.words else 1 << 17


def _sorted(records: Records, found: np.ndarray, query: Query) -> np.ndarray:
    if not query.sort:
        return found[::-1] if query.descending else found
    values = records.rows[query.sort][found]
    if query.sort in WORDS:
        values = np.argsort(np.argsort(np.array(records.words)))[values]
    if values.dtype.kind == "u":
        values = values.astype("i8")
    # What is unknown comes last, in either direction.
    return found[np.argsort(-values if query.descending else values, kind="stable")]


def _with_text(records: Records, found: np.ndarray, text: str) -> tuple[np.ndarray, int]:
    """Rows whose prompt or response has `text` in it, upper and lower case of ASCII alike; how many were looked at."""
    needle = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace").lower()
    plain, ends = text.lower(), time.monotonic() + SEARCH_SECONDS
    hits: list[int] = []
    for file_number in np.unique(records.rows["file"][found]):
        of_file = found[records.rows["file"][found] == file_number]
        with records.files[file_number].open() as source:
            for searched, number in enumerate(of_file):
                row = records.rows[number]
                source.seek(int(row["offset"]))
                line = source.read(min(int(row["length"]), MAX_LINE))
                if needle in line.lower() and plain in "\n".join(texts_of(line)[:2]).lower():
                    hits.append(int(number))
                if searched % 64 == 0 and time.monotonic() > ends:
                    return np.array(hits, dtype=np.int64), int(np.searchsorted(found, number)) + 1
    return np.array(hits, dtype=np.int64), len(found)


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return float(known.mean()) if len(known) else None


def group_of(records: Records, number: int) -> Sequence[int]:
    """Rows of the same file with the same prompt as a row."""
    row = records.rows[number]
    same = (records.rows["file"] == row["file"]) & (records.rows["prompt"] == row["prompt"])
    return [int(i) for i in np.flatnonzero(same)]
