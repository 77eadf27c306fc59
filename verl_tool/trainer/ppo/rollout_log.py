"""Record each rollout: write its trajectories to a file, compute metrics, and check the limits on faults."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl_tool.agent_loop.trajectory import GROUP, POLICY_INDUCED, REWARD_FAULT, VERSIONS, Trajectory
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.trainer.faults.fault_limits import FaultLimits, FaultWatch
from verl_tool.trainer.monitoring.token_records import TokenRecords
from verl_tool.trainer.ppo.advantage import compares_within_groups
from verl_tool.trainer.ppo.curiosity import curiosity_metrics
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory, drop_singleton_groups, with_grading
from verl_tool.trainer.ppo.tool_metrics import excluded_metrics, tool_metrics
from verl_tool.trainer.ppo.turns.turn_metrics import turn_reward_metrics
from verl_tool.trainer.run_folder.earlier_starts import archive_records
from verl_tool.util.atomic_files import atomic_write

TOKENS_TIMER = "timing_s/token_records"
"""Metric: the time in seconds that a step spent on writing token records."""


@dataclass(frozen=True)
class Rewards:
    """Results of grading and grouping, with one entry per trajectory of a rollout. Unknown values are None."""

    rewards: Sequence[float] | None = None
    columns: Mapping[str, Sequence[Any]] | None = None
    """The reward manager's ``reward_extra_info`` by name, including `REWARD_FAULT` and `POLICY_INDUCED` if present."""
    groups: Sequence[Any] | None = None
    """The prompt of each trajectory."""
    without_baseline: Collection[Any] = ()
    """Prompts whose greedy baseline (ReMax) faulted."""

    def outcomes(self, trajectories: Sequence[Trajectory], sampled: int | None) -> list[GradedTrajectory]:
        """Return the graded trajectories. Those left alone in a group of `sampled` are excluded, unless it is None."""
        n = len(trajectories)
        rewards = self.rewards if self.rewards is not None else [None] * n
        columns = self.columns or {}
        faults, policy_induced = (columns.get(name, [""] * n) for name in (REWARD_FAULT, POLICY_INDUCED))
        rows = zip(trajectories, rewards, faults, policy_induced, strict=True)
        outcomes = [with_grading(t, r, str(fault or ""), str(crash or "")) for t, r, fault, crash in rows]
        others = {name: values for name, values in columns.items() if name not in (REWARD_FAULT, POLICY_INDUCED)}
        outcomes = [
            replace(outcome, reward_extra_info={name: _json_value(values[i]) for name, values in others.items()})
            for i, outcome in enumerate(outcomes)
        ]
        if self.groups is None:
            return outcomes
        return drop_singleton_groups(outcomes, self.groups, sampled, self.without_baseline)


class RolloutLog:
    """Writes ``step_N.jsonl`` (or ``validation_N.jsonl``) to a folder, one line per trajectory."""

    def __init__(
        self, folder: Path | None, limits: FaultLimits | float, sampled: int | None = None, tokens_every: int = 0
    ) -> None:
        """`folder=None` writes no files. A number for `limits` is the limit on trajectories alone.

        `sampled` is the number of samples per prompt, if advantages compare them with each other. Token records are
        written every `tokens_every` steps; 0 disables them.
        """
        self.tokens = TokenRecords(folder, tokens_every)
        self._folder = folder
        self.limits = limits if isinstance(limits, FaultLimits) else FaultLimits(limits)
        self._watch = FaultWatch(self.limits)
        self._sampled = sampled
        self._files: dict[str, Path] = {}
        self._lines: dict[str, int] = {}
        self._trained: list[GradedTrajectory] = []
        self._last: list[GradedTrajectory] = []
        self._lost = 0
        self._validated: list[GradedTrajectory] = []

    def add(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float] | None,
        step: int,
        *,
        validation: bool,
        grading: Rewards | None = None,
        versions: Sequence[tuple[int, int]] | None = None,
        filtered: Sequence[GradedTrajectory] = (),
        lost: int = 0,
    ) -> range:
        """Record one rollout. Returns the numbers of the trajectories' lines in their file, from 0.

        A step may sample more than once, and a validation may come in several parts; each has one file. `grading` has
        the results of grading except `rewards`. `versions` are the oldest and newest weights that sampled each
        trajectory. `filtered` trajectories were dropped with their groups, and `lost` is the number that never arrived.
        Raises TooManyFaultsError if too many failed.
        """
        grading = replace(grading or Rewards(), rewards=rewards)
        outcomes = grading.outcomes(trajectories, None if validation else self._sampled)
        if validation:
            written = self._write(outcomes, step, "validation", validate=True)
            self._validated += outcomes
        else:
            written = self._write(outcomes, step, "step", validate=False, groups=grading.groups, versions=versions)
            self._trained += outcomes
            self._last, self._lost = outcomes, self._lost + lost
        self._watch.check([*outcomes, *filtered], lost)
        return written

    def add_baselines(self, trajectories: Sequence[Trajectory], rewards: Sequence[float] | None, step: int) -> None:
        """Record the greedy answers that are ReMax's baselines. They are neither trained on nor in any metric."""
        self._write(Rewards(rewards).outcomes(trajectories, None), step, "baseline", validate=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last training rollout, until `take_metrics` is called."""
        return _metrics(self._last, "agent", 0) if self._trained else {}

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the training rollouts since the last call."""
        trained, self._trained, lost, self._lost = self._trained, [], self._lost, 0
        return _metrics(trained, "agent", lost)

    def take_validation_metrics(self) -> dict[str, float]:
        """Return the metrics of all parts of the last validation. The next part starts a new validation."""
        validated, self._validated = self._validated, []
        self._files.pop("validation", None)
        return _metrics(validated, "val-agent", 0)

    def _write(
        self,
        outcomes: Sequence[GradedTrajectory],
        step: int,
        kind: str,
        *,
        validate: bool,
        groups: Sequence[Any] | None = None,
        versions: Sequence[tuple[int, int]] | None = None,
    ) -> range:
        if self._folder is None:
            return range(len(outcomes))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{kind}_{step}.jsonl"
        again = path == self._files.get(kind)
        if not again and path.exists():
            archive_records(path)
        self._files[kind] = path
        first = self._lines.get(kind, 0) if again else 0
        self._lines[kind] = first + len(outcomes)
        lines = range(first, first + len(outcomes))
        samples_of: Sequence[dict[str, int]] = (
            [{}] * len(outcomes) if groups is None else _first_lines_of_groups(groups, lines)
        )
        sampled_by: Sequence[dict[str, Any]] = [{}] * len(outcomes)
        if versions is not None:
            sampled_by = [{VERSIONS: list(oldest_and_newest)} for oldest_and_newest in versions]
        mode = "a" if again else "w"
        with _appended(path) if again else atomic_write(path) as target, target.open(mode, encoding="utf-8") as file:
            for outcome, group, version in zip(outcomes, samples_of, sampled_by, strict=True):
                file.write(outcome.recorded(step=step, validate=validate, **group, **version).to_json() + "\n")
        return lines


@contextmanager
def _appended(path: Path) -> Iterator[Path]:
    """Yield `path` for a block that appends to it. If the block raises, the file is restored."""
    size = path.stat().st_size
    try:
        yield path
    except BaseException:
        os.truncate(path, size)
        raise


def rollout_log(config: DictConfig) -> RolloutLog:
    """Create the log for a trainer's config."""
    folder = Path(config.trajectories_dir) if config.trajectories_dir else None
    grouped = compares_within_groups(config.algorithm.adv_estimator)
    sampled = config.actor_rollout_ref.rollout.n if grouped else None
    options = options_in(config)
    limits = FaultLimits(options.max_fault_fraction, options.max_call_fault_fraction, options.max_reward_fault_fraction)
    return RolloutLog(folder, limits, sampled, config.token_records_every)


def bypasses(config: DictConfig) -> bool:
    """Return whether the trainer uses the engine's log-probabilities and computes none before the update."""
    correction = config.algorithm.get("rollout_correction")
    return bool(correction and correction.get("bypass_mode"))


def _first_lines_of_groups(groups: Sequence[Any], lines: Sequence[int]) -> list[dict[str, int]]:
    """Return the group of each record: the line of its first trajectory."""
    firsts: dict[Any, int] = {}
    return [{GROUP: firsts.setdefault(group, line)} for group, line in zip(groups, lines, strict=True)]


def _json_value(value: Any) -> Any:
    """Convert `value` for JSON. NaN, which managers return without a reward, becomes null."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    return None if isinstance(value, float) and math.isnan(value) else value


def _metrics(outcomes: Sequence[GradedTrajectory], prefix: str, lost: int) -> dict[str, float]:
    if not outcomes:
        return {}
    metrics = tool_metrics([outcome.trajectory for outcome in outcomes], prefix=prefix)
    metrics |= excluded_metrics(outcomes, lost, prefix=prefix) | turn_reward_metrics(outcomes, prefix=prefix)
    return metrics | curiosity_metrics(outcomes, prefix=prefix)
