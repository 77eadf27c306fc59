"""The tools' state at a turn, made again: recorded calls run in new trajectories, their answers compared, and forks."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tool_channel import RELEASE_SECONDS
from verl_tool.client import ToolClient
from verl_tool.errors import ToolFault, VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.replay.branch.branch_point import BranchPoint
from verl_tool.replay.reexecute import Drift, ObservationComparison, drift_of, run_again, sent_with


class DriftError(VerlToolError):
    """The tools answer otherwise than they did, so that their state may not be that of then."""

    def __init__(self, message: str, drifts: Sequence[Drift]) -> None:
        super().__init__(message)
        self.drifts = tuple(drifts)


@dataclass(frozen=True)
class States:
    """Equal states of the tools, one for each branch."""

    trajectory_ids: tuple[str, ...]
    forked: bool
    """All but the first are forks of it; else the calls were run for each, or there was none to run."""
    drifts: tuple[Drift, ...] = ()
    """Differences that were accepted, of the first."""


@dataclass(frozen=True)
class StateRebuilder:
    """Makes the tools' state before a turn again."""

    client: ToolClient
    comparison: ObservationComparison
    options: EpisodeOptions
    accept_drift: bool = False
    """Go on although an answer is not what it was."""

    @contextlib.asynccontextmanager
    async def states(self, point: BranchPoint, n: int) -> AsyncIterator[States]:
        """`n` states as `point` had them, freed at the end of the block. Raises DriftError if a call is answered
        otherwise than it was and that is not accepted, or is not answered, or ends the trajectory now; ToolFault if a
        fork fails for another cause than that the tools make none."""
        ids = [uuid.uuid4().hex for _ in range(n)]
        started: list[str] = []
        try:
            yield await self._made(point, ids, started)
        finally:
            with contextlib.suppress(asyncio.TimeoutError, ToolFault):
                await asyncio.wait_for(self.client.finish(started), RELEASE_SECONDS)

    async def _made(self, point: BranchPoint, ids: Sequence[str], started: list[str]) -> States:
        if not point.calls:
            started += ids  # the branches' own calls make their states
            return States(tuple(ids), forked=False)
        first, others = ids[0], ids[1:]
        drifts = await self._rebuilt(point, first, started)
        # A verifier runs only where no other branch of the workspace is left, so each has a workspace of its own.
        forked = bool(others) and point.row.verification is None and await self._forked(first, others, started)
        if not forked:
            for each in others:
                await self._rebuilt(point, each, started)
        return States(tuple(ids), forked, tuple(drifts))

    async def _rebuilt(self, point: BranchPoint, trajectory_id: str, started: list[str]) -> list[Drift]:
        started.append(trajectory_id)
        drifts, over = [], ""
        sent = sent_with(point.trajectory, point.row, self.options)[: len(point.calls)]
        async for call, now, _ in run_again(self.client, trajectory_id, point.calls, sent, self.options):
            if now.fault is not None or not self.comparison.same(call, now):
                drifts.append(drift_of(str(point.place), self.comparison.tool_of(call), call, now))
            if now.fault is not None or now.done:
                over = f"call {call.step} " + ("gets no answer now" if now.fault else "ends the trajectory now")
                break
        if over:
            raise DriftError(f"{over}, so there is nothing to go on from", drifts)
        if drifts and not self.accept_drift:
            words = (
                f"{len(drifts)} of {len(point.calls)} calls before turn {point.turn} are answered otherwise than then"
            )
            raise DriftError(f"{words}; go on all the same with --accept_drift", drifts)
        return drifts

    async def _forked(self, first: str, others: Sequence[str], started: list[str]) -> bool:
        """Whether there are forks of the first now; False if its tools make none."""
        try:
            for each in others:
                await self.client.fork(first, each)
                started.append(each)
        except ToolFault as fault:
            if fault.kind is not FaultKind.NOT_FORKABLE or each != others[0]:
                raise
            return False
        return True
