"""Tools of the tool server for agents that speak MCP. Their calls belong to the session's rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_tool.agent_loop.actions import Action
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tool_channel import GRACE_SECONDS, ToolChannel, queue_timeout_of
from verl_tool.agent_loop.trajectory import Excluded, StopReason, Trajectory
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats.direct import DIRECT
from verl_tool.http.messages import HttpError
from verl_tool.protocol import DIRECT_FIELD, Fault, FaultKind, StepResult, ToolDescription
from verl_tool.servers.replica.mcp_endpoint import unknown_tool, written_call

MAX_CALLS = 1000
"""Of one session; further ones are answered with an error that the model may read."""
MAX_WAITING = 16
"""Calls of one session at a time; they run one after the other."""
_KNOWN_SECONDS = 60.0
"""How long the list of tools is kept, which another replica of the tool server would give too."""


class GatewayTools:
    """The tool server behind a gateway."""

    def __init__(self, client: ToolClient, options: EpisodeOptions, *, reads_images: bool = False) -> None:
        self._client = client
        self.channel = ToolChannel(client, options, None, reads_images=reads_images)
        self.call_seconds = options.tool_call_timeout + queue_timeout_of(client) + GRACE_SECONDS
        self._described: Sequence[ToolDescription] = ()
        self._described_at = -_KNOWN_SECONDS

    async def describe(self) -> Sequence[ToolDescription]:
        """All tools of the server. Raises ToolFault if it does not answer."""
        if time.monotonic() - self._described_at >= _KNOWN_SECONDS:
            self._described, self._described_at = await self._client.tools(), time.monotonic()
        return self._described

    def open(
        self, session_id: str, extra: Mapping[str, Any] | None = None, listed: Sequence[str] | None = None
    ) -> SessionTools:
        """The tools of one session. extra: what is sent with its calls (`build_call_extra`). listed: the only tools
        that it may use; None: all."""
        sent = {**(extra or {}), DIRECT_FIELD: True}
        return SessionTools(self, TrajectoryBuilder(session_id, True, {}, sent), listed)


class SessionTools:
    """The tools of one session, whose id is their trajectory's (`mcp_endpoint.McpTools`)."""

    def __init__(self, source: GatewayTools, builder: TrajectoryBuilder, listed: Sequence[str] | None) -> None:
        self._source, self._builder, self._listed = source, builder, listed
        self.turns_left = 0
        """Turns that the model still has, which tools are told."""
        self.model_was_asked = False
        """Whether a call that comes now can be the model's."""
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[StepResult]] = set()
        self._fault: Fault | None = None
        self._is_policy_induced = False
        self._is_closed = False

    @property
    def timeout_seconds(self) -> float:
        """Deadline of a call that comes now: those before it run first."""
        return self._source.call_seconds * (1 + len(self._running))

    async def describe(self) -> Sequence[ToolDescription]:
        """The tools that the session may use. Raises ToolFault if they are not known, which is the rollout's fault."""
        try:
            described = await self._source.describe()
        except ToolFault as error:
            self._fault = self._fault or error.as_fault()
            raise
        return [tool for tool in described if self._listed is None or tool.name in self._listed]

    async def call(
        self, name: str, arguments: Mapping[str, Any], headers: Mapping[bytes, bytes], meta: Mapping[str, Any]
    ) -> StepResult:
        """Run one call to its end, even if the agent's connection breaks: the tool has seen it. The trajectory and the
        step are the session's, whatever the agent names. Raises HttpError 503 if too many wait, and MCPError."""
        if len(self._running) >= MAX_WAITING:
            message = f"{MAX_WAITING} calls of this session are running; wait for their answers"
            raise HttpError(503, "overloaded", message, headers={"retry-after": "1"})
        known = [tool.name for tool in await self.describe()]
        if name not in known:
            raise unknown_tool(name, known)
        text = written_call(name, arguments)
        action = Action(text, tuple(DIRECT.find_calls(text)))
        task = asyncio.ensure_future(self._run(action, by_model=self.model_was_asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel what runs, and free the state of the tools: later, if the server may be at work on it."""
        self._is_closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if running:
            self._source.channel.release_later(self._builder)
        else:
            await self._source.channel.release(self._builder)

    def add_to(self, rollout: Trajectory) -> Trajectory:
        """`rollout` with the calls. After a fault of a tool it ends there: left out of the loss, unless a call of the
        model may have caused it."""
        calls = tuple(replace(call, over_mcp=True) for call in self._builder.calls)
        timings = replace(rollout.timings, tools=sum(call.seconds for call in calls))
        rollout = replace(rollout, calls=calls, timings=timings)
        if self._fault is None or rollout.excluded in (Excluded.ABORTED, Excluded.FAULT):
            return rollout
        excluded = None if self._is_policy_induced else Excluded.FAULT
        return replace(rollout, stop=StopReason.FAULT, fault=self._fault, excluded=excluded)

    async def _run(self, action: Action, *, by_model: bool) -> StepResult:
        builder = self._builder
        async with self._lock:
            if (reason := self._why_over()) is not None:
                return StepResult(builder.trajectory_id, reason, valid=False)
            if self._fault is not None:
                return StepResult(builder.trajectory_id, fault=self._fault)
            try:
                return await self._source.channel.call(builder, action, self.turns_left, is_last=False)
            except ToolFault as error:
                self._fault = error.as_fault()
                self._is_policy_induced = by_model and builder.is_policy_induced
            except ConfigError as error:
                self._fault = Fault(kind=FaultKind.MISCONFIGURED, message=str(error), retryable=False)
            return StepResult(builder.trajectory_id, fault=self._fault)

    def _why_over(self) -> str | None:
        calls = self._builder.calls
        if self._is_closed:
            return "Error: the session is finished"
        if calls and calls[-1].done:
            return "Error: the last call has ended the task; no tool can be called any more"
        return f"Error: at most {MAX_CALLS} calls can be made" if len(calls) >= MAX_CALLS else None
