"""Make the branches of a point: continuations from equal states of the tools, graded with the run's reward."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from eval_service.evaluation.record import Record
from eval_service.evaluation.scoring import Scorer
from verl_tool.agent_loop.rollout import all_or_none
from verl_tool.agent_loop.trajectory import REWARD_FAULT, Excluded, Trajectory
from verl_tool.replay.branch.branch_point import BranchPoint
from verl_tool.replay.branch.continuation import Continuation
from verl_tool.replay.branch.rebuilt_state import StateRebuilder, States
from verl_tool.replay.reexecute import Drift

BRANCH = "branch"
"""Key of a branch's origin in the `extra` of its record."""


@dataclass(frozen=True)
class Branch:
    point: BranchPoint
    trajectory: Trajectory
    """With its reward."""
    correct: bool | None = None
    """None without a score."""
    forked: bool = False
    """Whether the tools' state is a fork. Otherwise the calls were run for this branch."""
    drifts: tuple[Drift, ...] = ()
    """Accepted differences between the tools' answers and the stored ones."""

    def to_record(self, model: str, *, for_values: bool) -> Trajectory:
        """Return the trajectory with its origin and the name of its `model`."""
        edit = self.point.edit
        origin = {
            "file": self.point.location.file,
            "line": self.point.location.line,
            "trajectory_id": self.point.trajectory.trajectory_id,
            "turn": self.point.turn,
            "edited": None if edit is None else edit.part,
            "text": None if edit is None else edit.text,
            "model": model,
            "forked": self.forked,
            "for_values": for_values,
            "drift": [vars(drift) for drift in self.drifts],
        }
        return replace(self.trajectory, extra={**self.trajectory.extra, BRANCH: origin})


@dataclass(frozen=True)
class Brancher:
    continuation: Continuation
    scorer: Scorer
    rebuilder: StateRebuilder | None
    """None without tools."""

    async def run(self, point: BranchPoint, n: int, advance: Callable[[], None]) -> list[Branch]:
        """Make `n` branches of `point`, and call `advance` after each. If one raises, the others are cancelled and all
        states on the tool server are released."""
        async with self._provide_states(point, n) as states:

            async def make_branch(trajectory_id: str) -> Branch:
                trajectory = await self.continuation.run(point, trajectory_id)
                branch = await self._grade(point, trajectory)
                advance()
                forked = states.forked and trajectory_id != states.trajectory_ids[0]
                return replace(branch, forked=forked, drifts=states.drifts)

            return await all_or_none([asyncio.ensure_future(make_branch(each)) for each in states.trajectory_ids])

    def _provide_states(self, point: BranchPoint, n: int) -> AbstractAsyncContextManager[States]:
        if self.rebuilder is None:
            return contextlib.nullcontext(States(tuple(uuid.uuid4().hex for _ in range(n)), forked=False))
        return self.rebuilder.rebuild(point, n)

    async def _grade(self, point: BranchPoint, trajectory: Trajectory) -> Branch:
        """Grade the trajectory. One that ended in a fault or was aborted has no reward, as in a training."""
        extra = point.trajectory.row
        if trajectory.excluded in (Excluded.FAULT, Excluded.ABORTED):
            return Branch(point, replace(trajectory, extra=extra))
        ungraded = Record(point.row.index, 0, "", trajectory=trajectory)
        record = await self.scorer.score(ungraded, point.row)
        if record.score is None:
            graded = {**extra, REWARD_FAULT: record.reward_fault or ""}
            return Branch(point, replace(trajectory, excluded=Excluded.GRADER, extra=graded))
        graded = {**extra, "reward_extra_info": {"acc": float(bool(record.correct)), **record.details}}
        return Branch(point, replace(trajectory, reward=record.score, extra=graded), record.correct)
