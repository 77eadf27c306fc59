"""What is known of one answer, one line of JSON each: a run that was broken off goes on behind its last line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError
from verl_tool.util.atomic_files import atomic_write

RECORDS = "records.jsonl"
"""An evaluation's answers, a line each."""
ABOUT = "evaluation.json"
"""What answered and how it was asked, beside the records."""
Key = tuple[int, int]
"""Row and sample."""


@dataclass(frozen=True)
class Record:
    """One answer, or why there is none."""

    index: int
    sample: int
    digest: str
    """Of the problem, the model and the sampling; a record of another evaluation is not taken for this one's."""
    content: str = ""
    finish_reason: str | None = None
    stop_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    trajectory: Trajectory | None = None
    """None from an endpoint that gives none."""
    error: str | None = None
    """Why there is no answer: it counts neither as right nor as wrong, and is asked for again."""
    score: float | None = None
    correct: bool | None = None
    details: dict[str, float] = field(default_factory=dict)
    """What the reward manager told besides."""
    reward_fault: str | None = None
    """Why there is no score."""
    problem: str = ""
    """Digest of the problem alone, by which two evaluations are compared; empty in records that predate it."""

    @property
    def key(self) -> Key:
        return self.index, self.sample

    @property
    def scored(self) -> bool:
        return self.error is None and self.correct is not None

    def with_score(self, score: float, correct: bool, details: Mapping[str, float]) -> Record:
        return replace(self, score=score, correct=correct, details=dict(details), reward_fault=None)

    def to_json(self) -> str:
        """One line, without the line's end."""
        return _ADAPTER.dump_json(self).decode()


with_config(ConfigDict(ser_json_inf_nan="strings"))(Record)
_ADAPTER = TypeAdapter(Record)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; a last line that was cut off is left out. Raises ConfigError for another bad line."""
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _ADAPTER.validate_json(line)
        except ValidationError as error:
            if number == len(lines):
                return
            raise ConfigError(f"{path}:{number} is no record: {error.errors()[0]['msg']}; move the file away") from None


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Replace the file, whole or not at all."""
    with atomic_write(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def any_of(details: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among a reward manager's details."""
    return {name: float(value) for name, value in details.items() if isinstance(value, (int, float))}
