"""Rebuild the tools' state at a turn: run the recorded calls again, compare their answers, and fork."""

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
from verl_tool.replay.reexecute import Drift, ObservationComparison, build_call_extras, describe_drift, replay_calls


class DriftError(VerlToolError):
    """The tools answer differently, so the rebuilt state may differ from the recorded one."""

    def __init__(self, message: str, drifts: Sequence[Drift]) -> None:
        super().__init__(message)
        self.drifts = tuple(drifts)


@dataclass(frozen=True)
class States:
    """Equal states of the tools, one for each branch."""

    trajectory_ids: tuple[str, ...]
    forked: bool
    """Whether all but the first are forks of it. Otherwise the calls, if any, were run for each."""
    drifts: tuple[Drift, ...] = ()
    """Accepted drifts of the first state."""


@dataclass(frozen=True)
class StateRebuilder:
    """Rebuilds the tools' state before a turn."""

    client: ToolClient
    comparison: ObservationComparison
    options: EpisodeOptions
    accept_drift: bool = False
    """Continue although answers differ."""

    @contextlib.asynccontextmanager
    async def rebuild(self, point: BranchPoint, n: int) -> AsyncIterator[States]:
        """Yield `n` states as they were at `point`, and release them at the end. Raises DriftError if a call fails,
        ends the trajectory, or is answered differently and that is not accepted; ToolFault if a fork fails although
        the tools can fork."""
        ids = [uuid.uuid4().hex for _ in range(n)]
        started: list[str] = []
        try:
            yield await self._make_states(point, ids, started)
        finally:
            with contextlib.suppress(asyncio.TimeoutError, ToolFault):
                await asyncio.wait_for(self.client.finish(started), RELEASE_SECONDS)

    async def _make_states(self, point: BranchPoint, ids: Sequence[str], started: list[str]) -> States:
        if not point.calls:
            started += ids  # states are created by the first call of each branch
            return States(tuple(ids), forked=False)
        first, others = ids[0], ids[1:]
        drifts = await self._run_calls(point, first, started)
        # A verifier needs a workspace without other branches, so each branch gets a separate one.
        forked = bool(others) and point.row.verification is None and await self._fork(first, others, started)
        if not forked:
            for each in others:
                await self._run_calls(point, each, started)
        return States(tuple(ids), forked, tuple(drifts))

    async def _run_calls(self, point: BranchPoint, trajectory_id: str, started: list[str]) -> list[Drift]:
        started.append(trajectory_id)
        drifts, failure = [], ""
        extras = build_call_extras(point.trajectory, point.row, self.options)[: len(point.calls)]
        async for call, now, _ in replay_calls(self.client, trajectory_id, point.calls, extras, self.options):
            if now.fault is not None or not self.comparison.is_same(call, now):
                drifts.append(describe_drift(str(point.location), self.comparison.tool_name(call), call, now))
            if now.fault is not None or now.done:
                failure = f"call {call.step} now " + ("fails" if now.fault else "ends the trajectory")
                break
        if failure:
            raise DriftError(f"{failure}, so there is no state to continue from", drifts)
        if drifts and not self.accept_drift:
            counts = f"{len(drifts)} of {len(point.calls)} calls before turn {point.turn}"
            raise DriftError(f"{counts} are answered differently; continue with --accept_drift", drifts)
        return drifts

    async def _fork(self, first: str, others: Sequence[str], started: list[str]) -> bool:
        """Fork the first state. Returns False if its tools cannot fork."""
        try:
            for each in others:
                await self.client.fork(first, each)
                started.append(each)
        except ToolFault as fault:
            if fault.kind is not FaultKind.NOT_FORKABLE or each != others[0]:
                raise
            return False
        return True
