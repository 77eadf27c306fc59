"""What the trainer keeps of each rollout: a file of trajectories, metrics, and the decision to go on."""

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
"""Metric: seconds that a step spent on what is kept of its tokens."""


@dataclass(frozen=True)
class Rewards:
    """What grading and grouping told of a rollout's trajectories, one entry each. What is not known is left out."""

    rewards: Sequence[float] | None = None
    columns: Mapping[str, Sequence[Any]] | None = None
    """The reward manager's ``reward_extra_info`` by name, `REWARD_FAULT` and `POLICY_INDUCED` (if any) included."""
    groups: Sequence[Any] | None = None
    """The prompt that each is a sample of."""
    without_baseline: Collection[Any] = ()
    """Prompts whose greedy baseline (ReMax) faulted."""

    def outcomes(self, trajectories: Sequence[Trajectory], sampled: int | None) -> list[GradedTrajectory]:
        """The trajectories as graded; those left alone in a group of `sampled` are left out (None: nobody compares)."""
        n = len(trajectories)
        rewards = self.rewards if self.rewards is not None else [None] * n
        columns = self.columns or {}
        faults, policy_induced = (columns.get(name, [""] * n) for name in (REWARD_FAULT, POLICY_INDUCED))
        description = zip(trajectories, rewards, faults, policy_induced, strict=True)
        outcomes = [with_grading(t, r, str(fault or ""), str(broke or "")) for t, r, fault, broke in description]
        others = {name: values for name, values in columns.items() if name not in (REWARD_FAULT, POLICY_INDUCED)}
        outcomes = [
            replace(outcome, reward_extra_info={name: _json_value(values[i]) for name, values in others.items()})
            for i, outcome in enumerate(outcomes)
        ]
        if self.groups is None:
            return outcomes
        return drop_singleton_groups(outcomes, self.groups, sampled, self.without_baseline)


class RolloutLog:
    """Writes ``step_N.jsonl`` (or ``validation_N.jsonl``) into a folder, one line a trajectory."""

    def __init__(
        self, folder: Path | None, limits: FaultLimits | float, sampled: int | None = None, tokens_every: int = 0
    ) -> None:
        """`folder=None` writes no file. `limits`: a number is that of trajectories alone.

        `sampled`: how often each prompt is, if the advantages of its samples compare them with one another.
        `tokens_every`: steps from one whose tokens are kept to the next; 0: none is.
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
        told: Rewards | None = None,
        versions: Sequence[tuple[int, int]] | None = None,
        filtered: Sequence[GradedTrajectory] = (),
        lost: int = 0,
    ) -> range:
        """Keep one rollout. The numbers of the trajectories' lines in their file, from 0.

        A step may sample more than once, and a validation come in several parts; either goes into one file. `told` is
        what is known besides `rewards`, `versions` the oldest and the newest weights that sampled each. `filtered` were
        sampled and thrown away with their groups, `lost` trajectories did not come. Raises TooManyFaultsError if
        too much of it failed.
        """
        told = replace(told or Rewards(), rewards=rewards)
        outcomes = told.outcomes(trajectories, None if validation else self._sampled)
        if validation:
            written = self._write(outcomes, step, "validation", validate=True)
            self._validated += outcomes
        else:
            written = self._write(outcomes, step, "step", validate=False, groups=told.groups, versions=versions)
            self._trained += outcomes
            self._last, self._lost = outcomes, self._lost + lost
        self._watch.check([*outcomes, *filtered], lost)
        return written

    def add_baselines(self, trajectories: Sequence[Trajectory], rewards: Sequence[float] | None, step: int) -> None:
        """Keep the greedy answers that ReMax compares with; they are trained on nowhere and in no metric."""
        self._write(Rewards(rewards).outcomes(trajectories, None), step, "baseline", validate=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last training rollout, if they have not been taken."""
        return _metrics(self._last, "agent", 0) if self._trained else {}

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the training rollouts since they were last taken; nothing a second time."""
        trained, self._trained, lost, self._lost = self._trained, [], self._lost, 0
        return _metrics(trained, "agent", lost)

    def take_validation_metrics(self) -> dict[str, float]:
        """Metrics of all parts of the last validation; the next part starts a new one."""
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
    """Yield `path`, to whose end the block writes; if it raises, the file is as before."""
    size = path.stat().st_size
    try:
        yield path
    except BaseException:
        os.truncate(path, size)
        raise


def rollout_log(config: DictConfig) -> RolloutLog:
    """The log that a trainer's config asks for."""
    folder = Path(config.trajectories_dir) if config.trajectories_dir else None
    grouped = compares_within_groups(config.algorithm.adv_estimator)
    sampled = config.actor_rollout_ref.rollout.n if grouped else None
    options = options_in(config)
    limits = FaultLimits(options.max_fault_fraction, options.max_call_fault_fraction, options.max_reward_fault_fraction)
    return RolloutLog(folder, limits, sampled, config.token_records_every)


def bypasses(config: DictConfig) -> bool:
    """The trainer computes no log-probabilities of its own before the update, but takes the engine's."""
    correction = config.algorithm.get("rollout_correction")
    return bool(correction and correction.get("bypass_mode"))


def _first_lines_of_groups(groups: Sequence[Any], lines: Sequence[int]) -> list[dict[str, int]]:
    """What the records tell of their groups: the line of the first trajectory of the same one."""
    firsts: dict[Any, int] = {}
    return [{GROUP: firsts.setdefault(group, line)} for group, line in zip(groups, lines, strict=True)]


def _json_value(value: Any) -> Any:
    """`value` as JSON has it: NaN, which a manager tells where there is no reward, is null."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    return None if isinstance(value, float) and math.isnan(value) else value


def _metrics(outcomes: Sequence[GradedTrajectory], prefix: str, lost: int) -> dict[str, float]:
    if not outcomes:
        return {}
    description = tool_metrics([outcome.trajectory for outcome in outcomes], prefix=prefix)
    description |= excluded_metrics(outcomes, lost, prefix=prefix) | turn_reward_metrics(outcomes, prefix=prefix)
    return description | curiosity_metrics(outcomes, prefix=prefix)
