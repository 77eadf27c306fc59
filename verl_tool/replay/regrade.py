"""Stored trajectories before a reward manager again, and what it says of them now."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig
from rich.table import Table

from eval_service.evaluation.dataset import Problem
from eval_service.evaluation.record import Record
from eval_service.evaluation.scoring import Scorer, ScoringTokenizer, reward_config, reward_of_run
from eval_service.model.run_config import run_config, tokenizer_folder
from eval_service.model.tokenizer import load_tokenizer
from verl_tool.agent_loop.trajectory import BONUS, Excluded
from verl_tool.agent_workers.reward_manager.grading.manager_worker import manager_in
from verl_tool.errors import ConfigError
from verl_tool.replay.stored import Grading, Stored

AT_A_TIME = 256
"""Trajectories that are held in memory; as many as 16 are graded at once."""
MAX_DISPLAY_CHARACTERS = 60
_TOLERANCE = 1e-5
"""Rewards are stored as verl's 32-bit floats."""
_NOT_GRADED = (Excluded.FAULT, Excluded.ABORTED)


@dataclass(frozen=True)
class ScoreDifference:
    where: str
    kind: str
    """The row's ``data_source``."""
    was: Grading
    now: Grading
    answer: str
    """The end of what the model wrote."""

    @property
    def lost(self) -> bool:
        """There was a score, and there is none."""
        return self.was.score is not None and self.now.score is None

    @property
    def why(self) -> str:
        """The score, and the reward manager's own values that are different."""
        found = [_describe("score", self.was.score, self.now.score)]
        was, now = self.was.details or {}, self.now.details or {}
        found += [
            _describe(name, was[name], now[name]) for name in was if name in now and not _equal(was[name], now[name])
        ]
        return "; ".join([*found, *(f"now {self.now.fault}" for _ in range(bool(self.now.fault)))])

    def to_json(self) -> str:
        content = {"where": self.where, "was": self.was.score, "now": self.now.score, "why": self.why}
        return json.dumps(content, ensure_ascii=False)


@dataclass
class RegradeReport:
    graded: int = 0
    without_row: list[str] = field(default_factory=list)
    """Trajectories whose row was not found."""
    left_out: int = 0
    """Trajectories that a training does not grade: they ended in a fault, or were aborted."""
    unscored: int = 0
    differences: list[ScoreDifference] = field(default_factory=list)
    _sums: Counter[str] = field(default_factory=Counter)

    def add(self, stored: Stored, now: Grading) -> None:
        self.graded += 1
        self.unscored += now.score is None
        was = replace(stored.grading, score=_without_bonus(stored.grading))
        for name, grading in (("was", was), ("now", now)):
            if grading.score is not None:
                self._sums[name] += 1
                self._sums[f"{name}_total"] += grading.score  # type: ignore[assignment]
        if not _same(was, now):
            assert stored.row is not None  # or it would not be graded
            self.differences.append(ScoreDifference(stored.where, stored.row.data_source, was, now, _end(stored)))

    def mean(self, name: str) -> float:
        """Mean score of ``was`` or ``now``; NaN without any."""
        return self._sums[f"{name}_total"] / self._sums[name] if self._sums[name] else math.nan

    def words(self) -> str:
        words = f"{self.graded} trajectories graded again, {len(self.differences)} otherwise than before"
        words += f"; mean score {self.mean('was'):.4f}, now {self.mean('now'):.4f}"
        words += f"; {self.unscored} without score" if self.unscored else ""
        words += f"; {self.left_out} ended in a fault and have none" if self.left_out else ""
        return words + (f"; {len(self.without_row)} without a row" if self.without_row else "")

    def lines(self) -> list[str]:
        return [difference.to_json() for difference in self.differences]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, asked: bool) -> int:
        """How many differences are neither `known` (where, and the score now) nor, if another reward was `asked` for,
        its effect: that a score is lost never is. A trajectory without a row counts as one."""
        new = [d for d in self.differences if (d.where, d.now.score) not in known and (d.lost or not asked)]
        return len(new) + len(self.without_row)

    def tables(self, rows: int = 20) -> list[Table]:
        """The differences, those that are alike in a line, the most frequent first."""
        alike: dict[tuple[str, str], list[ScoreDifference]] = defaultdict(list)
        for difference in self.differences:
            alike[difference.kind, difference.why].append(difference)
        table = Table("data source", "trajectories", "what changed", "such as", "its answer ends in")
        for (kind, why), group in sorted(alike.items(), key=lambda item: -len(item[1]))[:rows]:
            table.add_row(kind, str(len(group)), why, group[0].where, group[0].answer)
        if len(alike) > rows:
            table.caption = f"and {len(alike) - rows} other kinds of change; --output FILE has all"
        return [table] if alike else []


def reward_of(
    folder: Path, manager: str | None, options: dict[str, Any], tool_server_url: str | None, *, trained: bool
) -> DictConfig:
    """The config of the reward manager: the run's own, or `manager`, a name or the path of a .py file. Raises
    ConfigError if neither is known, UnusableError for a file without a manager."""
    if manager is not None and manager.endswith(".py"):
        config = reward_config(manager, options, tool_server_url)
        source = {"source": "importlib", "name": manager_in(Path(manager)), "module": {"path": manager}}
        config.reward.reward_manager = source
        return config
    if trained:
        return reward_of_run(run_config(folder), manager, options, tool_server_url)
    if manager is None:
        raise ConfigError(f"{folder} does not tell how it was graded; give --reward_manager, or --from_run")
    return reward_config(manager, options, tool_server_url)


def tokenizer_of(folder: Path) -> ScoringTokenizer:
    """The tokenizer that a run's reward managers had. Raises ConfigError if it is not there."""
    return cast(
        ScoringTokenizer, load_tokenizer(tokenizer_folder(folder)).tokenizer
    )  # transformers' own, which has defaults


async def regrade(stored: Iterable[Stored], scorer: Scorer) -> RegradeReport:
    report, remaining = RegradeReport(), iter(stored)
    while batch := list(islice(remaining, AT_A_TIME)):
        graded = [one for one in batch if _is_graded(one, report)]
        for one, now in zip(graded, await _gradings(graded, scorer), strict=True):
            report.add(one, now)
    return report


def _is_graded(stored: Stored, report: RegradeReport) -> bool:
    if stored.row is None:
        report.without_row.append(stored.where)
        return False
    out = stored.trajectory is not None and stored.trajectory.excluded in _NOT_GRADED
    report.left_out += out
    return not out


async def _gradings(stored: Sequence[Stored], scorer: Scorer) -> list[Grading]:
    places = asyncio.Semaphore(16)

    async def one(each: Stored) -> Grading:
        assert each.row is not None  # `_is_graded`
        async with places:
            record = await scorer.score(_record(each, each.row), each.row)
        return Grading(record.score, {**record.details}, record.reward_fault or "")

    return list(await asyncio.gather(*(one(each) for each in stored)))


def _record(stored: Stored, row: Problem) -> Record:
    """The answer as it was before it was graded."""
    trajectory = None if stored.trajectory is None else stored.trajectory.ungraded()
    return Record(row.index, 0, "", content=stored.content, trajectory=trajectory)


def _without_bonus(grading: Grading) -> float | None:
    """The score less what the trainer added to it for curiosity."""
    bonus = (grading.details or {}).get(BONUS)
    return grading.score if grading.score is None or bonus is None else grading.score - bonus


def _same(was: Grading, now: Grading) -> bool:
    """Values that only one of the two has do not count: another version of the reward manager tells other ones."""
    details = was.details or {}
    others = now.details or {}
    return _equal(was.score, now.score) and all(
        _equal(details[name], others[name]) for name in details if name in others
    )


def _equal(a: float | None, b: float | None) -> bool:
    a, b = (None if value is None or math.isnan(value) else float(value) for value in (a, b))
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _describe(name: str, was: float | None, now: float | None) -> str:
    words = ["none" if value is None or math.isnan(value) else f"{value:.6g}" for value in (was, now)]
    return f"{name} {words[0]} -> {words[1]}" if words[0] != words[1] else f"{name} {words[0]}"


def _end(stored: Stored) -> str:
    text = stored.content if stored.trajectory is None else stored.trajectory.model_text
    return repr(text[-MAX_DISPLAY_CHARACTERS:])[1:-1]
