"""The branches of a point: several continuations from equal states of the tools, each graded as the run grades."""

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
"""Key of a record's `extra`: where it comes from."""


@dataclass(frozen=True)
class Branch:
    point: BranchPoint
    trajectory: Trajectory
    """With its reward."""
    correct: bool | None = None
    """None: nobody knows, for there is no score."""
    forked: bool = False
    """The tools' state is a fork; else its calls were run for it."""
    drifts: tuple[Drift, ...] = ()
    """What the tools answered otherwise than then."""

    def recorded(self, model: str, *, for_values: bool) -> Trajectory:
        """The trajectory as its record tells it: with where it comes from, and by which `model`."""
        edit = self.point.edit
        origin = {
            "file": self.point.place.file,
            "line": self.point.place.line,
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
    states: StateRebuilder | None
    """None: nothing calls tools."""

    async def branches(self, point: BranchPoint, n: int, advance: Callable[[], None]) -> list[Branch]:
        """`n` branches of `point`; `advance` is told of each that is done. Raises what states and loop raise; the
        others are cancelled then, and no state is left on the tool server."""
        async with self._equal_states(point, n) as states:

            async def one(trajectory_id: str) -> Branch:
                trajectory = await self.continuation.run(point, trajectory_id)
                branch = await self._graded(point, trajectory)
                advance()
                forked = states.forked and trajectory_id != states.trajectory_ids[0]
                return replace(branch, forked=forked, drifts=states.drifts)

            return await all_or_none([asyncio.ensure_future(one(each)) for each in states.trajectory_ids])

    def _equal_states(self, point: BranchPoint, n: int) -> AbstractAsyncContextManager[States]:
        if self.states is None:
            return contextlib.nullcontext(States(tuple(uuid.uuid4().hex for _ in range(n)), forked=False))
        return self.states.states(point, n)

    async def _graded(self, point: BranchPoint, trajectory: Trajectory) -> Branch:
        """The trajectory with its reward; one that ended in a fault or was aborted has none, as in a training."""
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
