"""Grade stored trajectories again, and compare the scores with the stored ones."""

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
from verl_tool.replay.stored import Grading, StoredAnswer

BATCH_SIZE = 256
"""Number of trajectories in memory. At most 16 are graded concurrently."""
MAX_DISPLAY_CHARACTERS = 60
_TOLERANCE = 1e-5
"""Rewards are stored as verl's 32-bit floats."""
_NOT_GRADED = (Excluded.FAULT, Excluded.ABORTED)


@dataclass(frozen=True)
class ScoreDifference:
    where: str
    data_source: str
    was: Grading
    now: Grading
    answer: str
    """The end of the model's text."""

    @property
    def lost_score(self) -> bool:
        """Whether the trajectory had a score and has none now."""
        return self.was.score is not None and self.now.score is None

    @property
    def reason(self) -> str:
        """The score, the values of the reward manager that differ, and the fault if there is one."""
        changes = [_describe("score", self.was.score, self.now.score)]
        was, now = self.was.details or {}, self.now.details or {}
        common = [name for name in was if name in now]
        changes += [_describe(name, was[name], now[name]) for name in common if not _is_close(was[name], now[name])]
        return "; ".join([*changes, *([f"now {self.now.fault}"] if self.now.fault else [])])

    def to_json(self) -> str:
        content = {"where": self.where, "was": self.was.score, "now": self.now.score, "why": self.reason}
        return json.dumps(content, ensure_ascii=False)


@dataclass
class RegradeReport:
    graded: int = 0
    without_row: list[str] = field(default_factory=list)
    """Where the trajectories without a row are."""
    left_out: int = 0
    """Trajectories that a training does not grade, because they ended in a fault or were aborted."""
    unscored: int = 0
    differences: list[ScoreDifference] = field(default_factory=list)
    _sums: Counter[str] = field(default_factory=Counter)

    def add(self, stored: StoredAnswer, now: Grading) -> None:
        self.graded += 1
        self.unscored += now.score is None
        was = replace(stored.grading, score=_subtract_bonus(stored.grading))
        for name, grading in (("was", was), ("now", now)):
            if grading.score is not None:
                self._sums[name] += 1
                self._sums[f"{name}_total"] += grading.score  # type: ignore[assignment]
        if not _is_same(was, now):
            assert stored.row is not None  # see `_is_graded`
            self.differences.append(ScoreDifference(stored.where, stored.row.data_source, was, now, _excerpt(stored)))

    def mean(self, name: str) -> float:
        """Return the mean score of ``was`` or ``now``. NaN if there are no scores."""
        return self._sums[f"{name}_total"] / self._sums[name] if self._sums[name] else math.nan

    def summary(self) -> str:
        text = f"{self.graded} trajectories graded again, {len(self.differences)} differ"
        text += f"; mean score {self.mean('was'):.4f}, now {self.mean('now'):.4f}"
        text += f"; {self.unscored} without a score" if self.unscored else ""
        text += f"; {self.left_out} ended in a fault and have none" if self.left_out else ""
        return text + (f"; {len(self.without_row)} without a row" if self.without_row else "")

    def lines(self) -> list[str]:
        return [difference.to_json() for difference in self.differences]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, reward_changed: bool) -> int:
        """Count the trajectories without a row and the differences that are not in `known`: pairs of `where` and the
        new score. If `reward_changed`, only lost scores are unexpected."""
        unknown = [each for each in self.differences if (each.where, each.now.score) not in known]
        return sum(each.lost_score or not reward_changed for each in unknown) + len(self.without_row)

    def tables(self, rows: int = 20) -> list[Table]:
        """Tabulate the differences, with equal ones grouped and the most frequent first."""
        groups: dict[tuple[str, str], list[ScoreDifference]] = defaultdict(list)
        for difference in self.differences:
            groups[difference.data_source, difference.reason].append(difference)
        table = Table("data source", "trajectories", "what changed", "example", "end of its answer")
        for (source, reason), group in sorted(groups.items(), key=lambda item: -len(item[1]))[:rows]:
            table.add_row(source, str(len(group)), reason, group[0].where, group[0].answer)
        if len(groups) > rows:
            table.caption = f"and {len(groups) - rows} other kinds of change; --output FILE writes all"
        return [table] if groups else []


def load_reward_config(
    folder: Path, manager: str | None, options: dict[str, Any], tool_server_url: str | None, *, trained: bool
) -> DictConfig:
    """Return the config of the reward manager: `manager`, which is a name or the path of a .py file, or by default the
    run's. Raises ConfigError if neither is known, UnusableError if the file has no manager."""
    if manager is not None and manager.endswith(".py"):
        config = reward_config(manager, options, tool_server_url)
        source = {"source": "importlib", "name": manager_in(Path(manager)), "module": {"path": manager}}
        config.reward.reward_manager = source
        return config
    if trained:
        return reward_of_run(run_config(folder), manager, options, tool_server_url)
    if manager is None:
        raise ConfigError(f"{folder} does not name its reward manager; give --reward_manager or --from_run")
    return reward_config(manager, options, tool_server_url)


def load_scoring_tokenizer(folder: Path) -> ScoringTokenizer:
    """Load the tokenizer of a run's reward managers. Raises ConfigError if it does not exist."""
    return cast(ScoringTokenizer, load_tokenizer(tokenizer_folder(folder)).tokenizer)


async def regrade(stored: Iterable[StoredAnswer], scorer: Scorer) -> RegradeReport:
    report, remaining = RegradeReport(), iter(stored)
    while batch := list(islice(remaining, BATCH_SIZE)):
        graded = [one for one in batch if _is_graded(one, report)]
        for one, now in zip(graded, await _grade(graded, scorer), strict=True):
            report.add(one, now)
    return report


def _is_graded(stored: StoredAnswer, report: RegradeReport) -> bool:
    """Return whether to grade an answer. If not, count it in the report."""
    if stored.row is None:
        report.without_row.append(stored.where)
        return False
    left_out = stored.trajectory is not None and stored.trajectory.excluded in _NOT_GRADED
    report.left_out += left_out
    return not left_out


async def _grade(stored: Sequence[StoredAnswer], scorer: Scorer) -> list[Grading]:
    slots = asyncio.Semaphore(16)

    async def one(each: StoredAnswer) -> Grading:
        assert each.row is not None  # `_is_graded`
        async with slots:
            record = await scorer.score(_make_record(each, each.row), each.row)
        return Grading(record.score, {**record.details}, record.reward_fault or "")

    return list(await asyncio.gather(*(one(each) for each in stored)))


def _make_record(stored: StoredAnswer, row: Problem) -> Record:
    """Return the record of the ungraded answer."""
    trajectory = None if stored.trajectory is None else stored.trajectory.ungraded()
    return Record(row.index, 0, "", content=stored.content, trajectory=trajectory)


def _subtract_bonus(grading: Grading) -> float | None:
    """Return the score without the trainer's curiosity bonus."""
    bonus = (grading.details or {}).get(BONUS)
    return grading.score if grading.score is None or bonus is None else grading.score - bonus


def _is_same(was: Grading, now: Grading) -> bool:
    """Compare the values that both have, since another version of a reward manager may report others."""
    details = was.details or {}
    others = now.details or {}
    common = details.keys() & others.keys()
    return _is_close(was.score, now.score) and all(_is_close(details[name], others[name]) for name in common)


def _is_close(a: float | None, b: float | None) -> bool:
    a, b = (None if value is None or math.isnan(value) else float(value) for value in (a, b))
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _describe(name: str, was: float | None, now: float | None) -> str:
    texts = ["none" if value is None or math.isnan(value) else f"{value:.6g}" for value in (was, now)]
    return f"{name} {texts[0]} -> {texts[1]}" if texts[0] != texts[1] else f"{name} {texts[0]}"


def _excerpt(stored: StoredAnswer) -> str:
    text = stored.content if stored.trajectory is None else stored.trajectory.model_text
    return repr(text[-MAX_DISPLAY_CHARACTERS:])[1:-1]
