"""What a table tells of a trajectory, read from its line without most of it: one row of numbers a line."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

UNNAMED = "(no call found)"
UNREADABLE = "unreadable"
"""Stop reason of a line that is no record."""
OTHER = "(other)"
MAX_WORDS = 65_000
"""Different words of a run; further ones are `OTHER`."""
MAX_TURNS = 16
"""Later calls are counted with this one."""

ROW = np.dtype(
    [
        ("offset", "i8"), ("length", "i8"), ("prompt", "u8"), ("index", "i8"), ("file", "u4"), ("line", "u4"),
        ("step", "i4"), ("sample", "i4"), ("prompt_tokens", "u4"), ("model_tokens", "u4"), ("tool_tokens", "u4"),
        ("kind", "u2"), ("stop", "u2"), ("fault", "u2"), ("excluded", "u2"), ("tools", "u2"), ("turns", "u2"),
        ("calls", "u2"), ("failed_calls", "u2"),
        ("reward", "f4"), ("correct", "f4"), ("advantage", "f4"), ("seconds", "f4"), ("generate_seconds", "f4"),
        ("tool_seconds", "f4"),
    ]
)  # fmt: skip
"""`prompt` is a hash of the prompt; `kind` to `tools` are places in a list of words; what is unknown is NaN or -1."""
WORDS = ("kind", "stop", "fault", "excluded", "tools")


class _Segment(msgspec.Struct):
    author: str = ""
    tokens: msgspec.Raw = msgspec.Raw(b"[]")
    text: str = ""
    agent: int = 0


class _Fault(msgspec.Struct):
    kind: str = ""
    message: str = ""


class _Call(msgspec.Struct):
    valid: bool = True
    fault: _Fault | None = None
    names: list[str] = []
    metrics: dict[str, Any] = {}
    seconds: float = 0.0
    truncated: bool = False
    invalid_reason: str | None = None


class _Timings(msgspec.Struct):
    generate: float = 0.0
    tools: float = 0.0
    total: float = 0.0


class _Extra(msgspec.Struct):
    index: Any = None
    reward_extra_info: dict[str, Any] = {}
    reward_fault: str = ""
    provoked: str = ""


class _Trajectory(msgspec.Struct):
    trajectory_id: str = ""
    segments: list[_Segment] = []
    stop: str = ""
    prompt_segments: int = 1
    calls: list[_Call] = []
    fault: _Fault | None = None
    excluded: str | None = None
    reward: float | str | None = None
    timings: _Timings = msgspec.field(default_factory=_Timings)
    extra: _Extra = msgspec.field(default_factory=_Extra)


class _Line(_Trajectory):
    """A trajectory, or an answer of an evaluation that may have one."""

    trajectory: _Trajectory | None = None
    index: Any = None
    sample: int = -1
    content: str = ""
    score: float | str | None = None
    correct: bool | None = None
    error: str | None = None
    stop_reason: str | None = None
    seconds: float = 0.0


_decode = msgspec.json.Decoder(_Line).decode


@dataclass
class ToolCallCounts:
    calls: int = 0
    failed: int = 0
    invalid: int = 0
    faults: int = 0
    truncated: int = 0
    seconds: float = 0.0
    by_turn: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(MAX_TURNS)])
    """Calls and failed calls, by their number in the trajectory."""


class RowReader:
    """Reads lines of one file; gathers words and counts of tools."""

    def __init__(self, words: Sequence[str] = ("",), tools: dict[str, ToolCallCounts] | None = None) -> None:
        self._words = {word: number for number, word in enumerate(words)}
        self.tools = dict(tools or {})

    @property
    def words(self) -> list[str]:
        """What the numbers of a row's `WORDS` stand for."""
        return list(self._words)

    def read(self, line: bytes, row: np.void, kind: str) -> None:
        """Fill `row` from a line; its place in the file is the caller's to tell."""
        row["kind"] = self._word(kind)
        for name in ("reward", "correct", "advantage", "seconds", "generate_seconds", "tool_seconds"):
            row[name] = math.nan
        row["index"] = row["sample"] = -1
        known, blank = len(self._words), row.copy()
        try:
            record = _decode(line)
            self._fill(row, record.trajectory or record)
            if kind == "evaluation":
                self._fill_answer(row, record)
        except (msgspec.DecodeError, ValueError, OverflowError, TypeError, RecursionError):
            while len(self._words) > known:  # those of this line
                self._words.popitem()
            for name in ROW.names or ():
                row[name] = blank[name]
            row["stop"] = self._word(UNREADABLE)

    def _word(self, word: str) -> int:
        if len(self._words) >= MAX_WORDS:
            return self._words.setdefault(OTHER, len(self._words))
        return self._words.setdefault(word[:200], len(self._words))

    def _fill(self, row: np.void, t: _Trajectory) -> None:
        info = t.extra.reward_extra_info
        prompt_segments = max(0, t.prompt_segments)
        raw = [bytes(segment.tokens) for segment in t.segments[:prompt_segments]]
        row["index"] = _whole(t.extra.index, 63)
        row["prompt"] = prompt_hash(raw, row["index"])
        row["prompt_tokens"] = sum(_length(tokens) for tokens in raw)
        turns = 0
        for segment in t.segments[prompt_segments:]:
            model = segment.author == "model"
            turns += model and not segment.agent
            row["model_tokens" if model else "tool_tokens"] += _length(bytes(segment.tokens))
        row["turns"] = min(turns, 65_535)
        row["stop"], row["excluded"] = self._word(t.stop), self._word(t.excluded or "")
        row["fault"] = self._word(_cause(t))
        row["tools"] = self._word(",".join(sorted({name for call in t.calls for name in call.names or (UNNAMED,)})))
        row["calls"] = min(len(t.calls), 65_535)
        row["failed_calls"] = min(sum(self._count(number, call) for number, call in enumerate(t.calls)), 65_535)
        row["reward"] = as_number(t.reward)
        row["correct"] = as_number(info.get("acc"))
        row["seconds"], row["generate_seconds"] = t.timings.total, t.timings.generate
        row["tool_seconds"] = t.timings.tools

    def _fill_answer(self, row: np.void, told: _Line) -> None:
        row["sample"], row["reward"], row["seconds"] = _whole(told.sample, 31), as_number(told.score), told.seconds
        row["correct"] = math.nan if told.correct is None else told.correct
        if isinstance(told.index, int):
            row["index"] = _whole(told.index, 63)
        if told.error is not None:
            row["fault"] = self._word("no answer")
        if told.trajectory is None:
            row["stop"] = self._word(told.stop_reason or "")
            row["prompt"] = prompt_hash([], row["index"])

    def _count(self, number: int, call: _Call) -> bool:
        failed = call_failed(call)
        turn = min(number, MAX_TURNS - 1)
        for name in call.names or (UNNAMED,):
            counts = self.tools.setdefault(name[:200], ToolCallCounts())
            counts.calls += 1
            counts.failed += failed
            counts.invalid += not call.valid and call.fault is None
            counts.faults += call.fault is not None
            counts.truncated += call.truncated
            counts.seconds += call.seconds
            counts.by_turn[turn][0] += 1
            counts.by_turn[turn][1] += failed
        return failed


def call_failed(call: _Call) -> bool:
    """It gave no observation, was none, or the tool says that it ended in an error or out of time."""
    flags = (call.metrics.get("error"), call.metrics.get("timed_out"))
    return call.fault is not None or not call.valid or any(isinstance(v, (int, float)) and v > 0 for v in flags)


def texts_of(line: bytes) -> tuple[str, str, str]:
    """The prompt, all behind it, and what the model wrote last; empty texts of a line that is no record."""
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", "", ""
    t = record.trajectory or record
    start = max(0, t.prompt_segments)
    prompt = "".join(segment.text for segment in t.segments[:start])
    behind = t.segments[start:]
    last = next(
        (segment.text for segment in reversed(behind) if segment.author == "model" and not segment.agent),
        record.content,
    )
    return prompt, "".join(segment.text for segment in behind) or record.content, last


def prompt_hash(tokens: Sequence[bytes], index: int) -> int:
    """The same for the same prompt of the same row of the data. 53 bits, which a browser's numbers hold."""
    joined = b"".join(tokens)
    return (zlib.crc32(joined) << 21) ^ (zlib.adler32(joined + str(index).encode()) & 0x1FFFFF)


def as_number(value: Any) -> float:
    """`value`, or NaN if it is no number."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _whole(value: Any, bits: int) -> int:
    """`value` if it is an integer of so many bits, else -1."""
    return value if isinstance(value, int) and -(1 << bits) <= value < 1 << bits else -1


def _cause(t: _Trajectory) -> str:
    if t.fault is not None:
        return t.fault.kind
    if t.stop == "aborted":
        return "aborted"
    return "grader" if t.extra.reward_fault else "grader_crashed" if t.extra.provoked else ""


def _length(tokens: bytes) -> int:
    return tokens.count(b",") + 1 if len(tokens) > 2 else 0
