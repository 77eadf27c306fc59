"""Trajectories of an earlier run in place of an engine's: ``actor_rollout_ref.replay=outputs/…/trajectories``."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from verl_tool.agent_loop.trajectory import Trajectory, read_jsonl
from verl_tool.errors import ConfigError

_NAME = re.compile(r"(step|validation)_(\d+)\.jsonl")


class StoredRollouts:
    """The trajectories in a folder, given out row by row in the order of their steps, and then from the first again."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if nothing is stored there."""
        self._folder = folder
        found = [(name, path) for path in folder.glob("*.jsonl") if (name := _NAME.fullmatch(path.name))]
        if not found:
            raise ConfigError(f"actor_rollout_ref.replay={folder} has no step_N.jsonl; give the trajectories of a run")
        self._stored: dict[tuple[bool, int | None], list[Trajectory]] = defaultdict(list)
        for name, path in sorted(found, key=lambda pair: int(pair[0].group(2))):
            for trajectory in read_jsonl(path):
                self._stored[name.group(1) == "validation", trajectory.extra.get("index")].append(trajectory)
        self._given: dict[tuple[bool, int | None], int] = defaultdict(int)

    def next(self, index: int | None, *, validation: bool) -> Trajectory:
        """The next trajectory of a row, as it was before it was graded. `index`: its ``extra_info.index``.

        Raises ConfigError if none is stored of the row, or if it holds an image, whose bytes are in no record.
        """
        key = (validation, index)
        stored = self._stored.get(key)
        if not stored:
            kind = "validation" if validation else "training"
            raise ConfigError(
                f"{self._folder} has no trajectory of row {index} of a {kind}; take the data, seed and batch size of "
                "its run, and set trainer.test_freq=-1 trainer.val_before_train=false if it was not validated"
            )
        trajectory = stored[self._given[key] % len(stored)].ungraded()
        self._given[key] += 1
        if any(segment.image is not None for segment in trajectory.segments):
            raise ConfigError(f"a trajectory of row {index} in {self._folder} holds images, which are not replayed")
        return trajectory
