"""Two evaluations of the same problems, compared problem by problem."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval_service.evaluation.record import ABOUT, RECORDS, Record, read_records
from verl_tool.agent_loop.trajectory import Author
from verl_tool.errors import ConfigError

RESAMPLES = 10_000
"""Of the bootstrap and of the permutation test."""
SETTINGS = ("data", "reward", "samples", "temperature", "top_p", "max_tokens", "seed")
"""Of ``evaluation.json``: what should be the same, so that a difference is the model's."""
_PORTION = 1 << 22
"""Numbers that are drawn at a time."""
_EXCERPT = 200


@dataclass(frozen=True)
class Evaluated:
    name: str
    about: dict[str, Any]
    """What answered and how it was asked; empty if the evaluation predates the file."""
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Difference:
    """The mean over problems of second minus first."""

    value: float
    low: float
    high: float
    """Ends of the 95% interval, by the paired bootstrap over problems."""
    p: float
    """Of no difference at all."""
    test: str
    """By which `p` was found."""


@dataclass(frozen=True)
class Flip:
    """A problem that one of the two solves in most of its answers, and the other does not."""

    index: int
    first: float
    second: float
    question: str
    first_answer: str
    second_answer: str
    """The ends of the texts; of each the first answer."""


@dataclass(frozen=True)
class Comparison:
    """What two evaluations say of each other. Shares are from 0 to 1."""

    first: str
    second: str
    problems: int
    """Problems with a scored answer in both."""
    left_out: int
    """Problems without one in either."""
    first_accuracy: float
    second_accuracy: float
    accuracy: Difference
    score: Difference | None
    """None if a score is missing."""
    solved: tuple[Flip, ...]
    lost: tuple[Flip, ...]
    remarks: tuple[str, ...]
    """What else differs between the two, or could not be checked."""


def read_evaluation(path: Path) -> Evaluated:
    """Read the folder of an evaluation, or its file of records. Raises ConfigError if there are no answers."""
    records = path / RECORDS if path.is_dir() else path
    if not records.is_file():
        raise ConfigError(f"{path} is no evaluation: there is no {records}; python -m eval_service.evaluate leaves one")
    found = tuple(read_records(records))
    if not found:
        raise ConfigError(f"{records} holds no answers")
    about = records.with_name(ABOUT)
    try:
        settings = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{about} is no JSON: {error}; remove it, and settings are not compared") from None
    return Evaluated(str(path), settings if isinstance(settings, dict) else {}, found)


def compare(first: Evaluated, second: Evaluated, *, seed: int = 0) -> Comparison:
    """Compare two evaluations. Raises ConfigError if they are of other problems."""
    remarks = [*_check_problems(first, second), *_differing_settings(first, second)]
    a, b = _by_problem(first), _by_problem(second)
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ConfigError(f"no problem has a scored answer in both {first.name} and {second.name}")
    shares = [[_share(records[index]) for index in shared] for records in (a, b)]
    binary = all(len(records[index]) == 1 for records in (a, b) for index in shared)
    scores = np.array([[_mean_score(records[index]) for index in shared] for records in (a, b)], dtype=float)
    flips = [_flip(index, a[index], b[index]) for index in shared]
    known = {r.index for r in first.records} | {r.index for r in second.records}
    return Comparison(
        first=first.name,
        second=second.name,
        problems=len(shared),
        left_out=len(known) - len(shared),
        first_accuracy=float(np.mean(shares[0])),
        second_accuracy=float(np.mean(shares[1])),
        accuracy=difference(np.subtract(shares[1], shares[0]), binary=binary, seed=seed),
        score=None if np.isnan(scores).any() else difference(scores[1] - scores[0], binary=False, seed=seed),
        solved=tuple(flip for flip in flips if flip.first <= 0.5 < flip.second),
        lost=tuple(flip for flip in flips if flip.second <= 0.5 < flip.first),
        remarks=tuple(remarks),
    )


def difference(values: np.ndarray, *, binary: bool, seed: int = 0) -> Difference:
    """The mean of differences, one a problem, with its paired bootstrap interval and a test of no difference.

    `binary`: each is -1, 0 or 1, of one answer a problem each; then McNemar's exact test (Q. McNemar, Psychometrika 12,
    1947), else the sign-flip permutation test.
    """
    rng = np.random.default_rng(seed)
    means = np.concatenate([values[rng.integers(0, len(values), (n, len(values)))].mean(1) for n in _portions(values)])
    low, high = np.quantile(means, (0.025, 0.975))
    mean = float(values.mean())
    if binary:
        p, test = _mcnemar(int((values > 0).sum()), int((values < 0).sum())), "exact McNemar"
    else:
        p, test = _sign_flips(values, rng), "sign-flip permutation"
    return Difference(mean, min(float(low), mean), max(float(high), mean), p, test)


def _portions(values: np.ndarray) -> Iterator[int]:
    left = RESAMPLES
    while left > 0:
        n = min(left, max(1, _PORTION // len(values)))
        yield n
        left -= n


def _mcnemar(gained: int, lost: int) -> float:
    """The two-sided binomial test of `gained` in all discordant pairs, at one half."""
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def _sign_flips(values: np.ndarray, rng: np.random.Generator) -> float:
    if not np.any(values):
        return 1.0
    extreme = 0
    for n in _portions(values):
        signs = rng.integers(0, 2, (n, len(values)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs((signs * values).mean(1)) >= abs(values.mean()) - 1e-12).sum())
    return (extreme + 1) / (RESAMPLES + 1)


def _check_problems(first: Evaluated, second: Evaluated) -> Iterator[str]:
    """Raises ConfigError if the two answer other problems; a remark if nothing tells."""
    a, b = ({record.index: record.problem for record in each.records} for each in (first, second))
    if set(a) != set(b):
        only_a, only_b = (sorted(set(x) - set(y)) for x, y in ((a, b), (b, a)))
        unshared = "; ".join(
            f"{len(only)} problems are in {name} alone, such as row {only[0]}"
            for only, name in ((only_a, first.name), (only_b, second.name))
            if only
        )
        raise ConfigError(
            f"{first.name} and {second.name} have different problems ({len(a)} and {len(b)}): {unshared}. Evaluate "
            "both on the same --data with the same --limit"
        )
    other = [index for index in a if a[index] and b[index] and a[index] != b[index]]
    if other:
        raise ConfigError(
            f"{first.name} and {second.name} are of different problems: row {min(other)}, and {len(other) - 1} more of "
            f"{len(a)}, have another question or another right answer. Evaluate both on the same --data"
        )
    if not all(a[index] and b[index] for index in a):
        yield "records that predate the digest of the problem: that both answer the same questions is not checked"


def _differing_settings(first: Evaluated, second: Evaluated) -> Iterator[str]:
    for evaluated in (first, second):
        if not evaluated.about:
            yield f"{evaluated.name} has no {ABOUT}: how it was asked is not compared"
            return
    for name in SETTINGS:
        a, b = first.about.get(name), second.about.get(name)
        if a != b:
            yield f"{name} differs: {_value(a)} and {_value(b)}"
    if first.about.get("fingerprint") is not None and first.about["fingerprint"] == second.about.get("fingerprint"):
        yield "both are answers of the same weights with the same loop"


def _value(value: Any) -> str:
    return "the endpoint's default" if value is None else str(value)


def _by_problem(evaluated: Evaluated) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for record in sorted(evaluated.records, key=lambda record: record.key):
        if record.scored:
            found[record.index].append(record)
    return found


def _share(records: Sequence[Record]) -> float:
    return sum(bool(record.correct) for record in records) / len(records)


def _mean_score(records: Sequence[Record]) -> float | None:
    scores = [record.score for record in records if record.score is not None]
    return sum(scores) / len(scores) if len(scores) == len(records) else None


def _flip(index: int, first: Sequence[Record], second: Sequence[Record]) -> Flip:
    question = next((_question(record) for record in (*first, *second) if record.trajectory is not None), "")
    return Flip(index, _share(first), _share(second), question, _answer(first[0]), _answer(second[0]))


def _question(record: Record) -> str:
    trajectory = record.trajectory
    texts = [] if trajectory is None else [s.text for s in trajectory.segments if s.author is Author.PROMPT]
    return "".join(texts)[-_EXCERPT:]


def _answer(record: Record) -> str:
    return record.content[-_EXCERPT:]
