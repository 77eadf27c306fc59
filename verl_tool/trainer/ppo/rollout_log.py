"""What the trainer keeps of each rollout: a file of trajectories, metrics, and the decision to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from verl_tool.agent_loop.config import options_in
from verl_tool.agent_loop.rollout import check_faults
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.trainer.ppo.tool_metrics import tool_metrics


class RolloutLog:
    """Writes ``step_N.jsonl`` (or ``validation_N.jsonl``) into a folder, one line a trajectory."""

    def __init__(self, folder: Path | None, max_fault_fraction: float) -> None:
        """`folder=None` writes no file. See `check_faults` for `max_fault_fraction`."""
        self._folder = folder
        self._max_fault_fraction = max_fault_fraction
        self._validation_file: Path | None = None
        self._metrics: dict[str, float] = {}
        self._validated: list[Trajectory] = []

    def add(self, lines: Sequence[str], rewards: Sequence[float] | None, step: int, *, validation: bool) -> None:
        """Keep one rollout, each trajectory as a line of JSON.

        Validation may come in several parts; they go into one file. Raises TooManyFaultsError if most faulted.
        """
        told = {"step": step, "validate": validation}
        trajectories = [Trajectory.from_json(line) for line in lines]
        trajectories = [replace(t, extra={**t.extra, **told}) for t in trajectories]
        if rewards is not None:
            trajectories = [t.with_reward(reward) for t, reward in zip(trajectories, rewards, strict=True)]
        self._write(trajectories, step, validation)
        if validation:
            self._validated += trajectories
        else:
            self._metrics = tool_metrics(trajectories)
        check_faults([t.fault for t in trajectories], self._max_fault_fraction)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last training rollout, if they have not been taken."""
        return self._metrics

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the last training rollout; nothing a second time."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def take_validation_metrics(self) -> dict[str, float]:
        """Metrics of all parts of the last validation; the next part starts a new one."""
        validated, self._validated, self._validation_file = self._validated, [], None
        return tool_metrics(validated, prefix="val-agent") if validated else {}

    def _write(self, trajectories: Sequence[Trajectory], step: int, validation: bool) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / (f"validation_{step}.jsonl" if validation else f"step_{step}.jsonl")
        again = validation and path == self._validation_file
        self._validation_file = path if validation else self._validation_file
        with path.open("a" if again else "w", encoding="utf-8") as file:
            file.writelines(trajectory.to_json() + "\n" for trajectory in trajectories)


def rollout_log(config: DictConfig) -> RolloutLog:
    """The log that a trainer's config asks for."""
    folder = Path(config.trajectories_dir) if config.trajectories_dir else None
    return RolloutLog(folder, options_in(config).max_fault_fraction)
