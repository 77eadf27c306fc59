"""One step of an earlier run, its batch as it was: ``actor_rollout_ref.replay_step=3``."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl_tool.agent_loop.trajectory import BONUS, GROUP, POLICY_INDUCED, REWARD_FAULT, Trajectory, read_jsonl
from verl_tool.errors import ConfigError, VerlToolError

STORED_LINE = "stored_line"
"""Among the ``extra_fields`` of a row: the line of its record, by which the newer trainer sorts its rows."""
_STEP = re.compile(r"step_(\d+)\.jsonl")


class LostRolloutError(VerlToolError):
    """The rollout of this sample raised in the run, so it does again."""


@dataclass(frozen=True)
class Graded:
    """A trajectory with what it was given by the reward manager, which is not asked again."""

    trajectory: Trajectory
    """As before it was graded."""
    reward: float
    """Without what the trainer added to it for its group; 0 where there was none."""
    told: dict[str, Any]
    """The reward manager's ``reward_extra_info``."""


class StoredStep:
    """The batch of one step: each trajectory in its place, with the reward that it was given."""

    def __init__(self, folder: Path, number: int, sampled: int) -> None:
        """`sampled`: how often each prompt was.

        Raises ConfigError if the step is not stored, is no batch that can be made again, or holds images.
        """
        self.number = number
        self.path = folder / f"step_{number}.jsonl"
        if not self.path.is_file():
            there = ", ".join(map(str, stored_steps(folder))) or "none"
            raise ConfigError(f"{folder} has no step_{number}.jsonl; steps that are stored: {there}")
        try:
            self._lines = list(read_jsonl(self.path))
        except ValidationError as error:
            raise ConfigError(f"{self.path} has a line that is no trajectory: {error.errors()[0]['msg']}") from None
        if any(segment.image is not None for line in self._lines for segment in line.segments):
            raise ConfigError(f"{self.path} holds trajectories with images, whose bytes are in no record")
        groups: dict[Any, list[int]] = defaultdict(list)
        for line, trajectory in enumerate(self._lines):
            # Records of verl-tool before it told of groups: a prompt is told by its row.
            groups[trajectory.extra.get(GROUP, trajectory.extra.get("index"))].append(line)
        self._groups = list(groups.values())
        if any(len(group) > sampled for group in self._groups):
            raise ConfigError(
                f"{self.path} does not tell which trajectories are samples of one prompt: "
                f"{max(map(len, self._groups))} have the same index, of {sampled} a prompt "
                "(actor_rollout_ref.rollout.n)"
            )
        self._begun: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def sample_of(self, prompt: str, sample: int) -> int:
        """The line of a sample of a prompt; prompts are given the step's groups as they come, whatever they ask.

        Raises LostRolloutError where that of the run raised, and left no trajectory.
        """
        group = self._begun.setdefault(prompt, len(self._begun))
        if group >= len(self._groups) or sample >= len(self._groups[group]):
            raise LostRolloutError(f"{self.path} has no sample {sample} of its group {group}: the run lost it")
        return self._groups[group][sample]

    def at(self, line: int) -> Graded:
        """The trajectory of a line. Raises ConfigError if there is none."""
        if line >= len(self._lines):
            raise ConfigError(f"{self.path} has {len(self._lines)} trajectories, and the batch has more")
        stored = self._lines[line]
        info = dict(stored.extra.get("reward_extra_info") or {})
        bonus = info.pop(BONUS, None) or 0.0
        info = {name: math.nan if value is None else value for name, value in info.items()}
        faults = {REWARD_FAULT: "reward_fault", POLICY_INDUCED: "provoked"}
        description = {name: str(stored.extra.get(recorded) or "") for name, recorded in faults.items()} | info
        reward = 0.0 if stored.reward is None else stored.reward - bonus
        return Graded(replace(stored.ungraded(), extra=stored.sampled_extra), reward, description)


def stored_steps(folder: Path) -> list[int]:
    """The steps of which a folder holds trajectories, in order."""
    return sorted(int(name.group(1)) for path in folder.glob("*.jsonl") if (name := _STEP.fullmatch(path.name)))
