"""Runs one action: finds its calls, has the tools run them in order, and answers whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from verl_tool.content.parts import AudioPart, ImagePart, MediaPart, as_parts, reject_too_much
from verl_tool.errors import ConfigError, ContentError, SandboxError, ToolFault
from verl_tool.formats.load import specs_of
from verl_tool.http.metrics import NO_TOOL, ToolMetrics
from verl_tool.protocol import (
    AUDIOS_FIELD,
    DIRECT_FIELD,
    FILES_FIELD,
    FORMATS_FIELD,
    IMAGES_FIELD,
    KEEP_FIELD,
    TOOL_FIELD,
    TOOLS_FIELD,
    VERIFY_FIELD,
    FaultKind,
    StepRequest,
    StepResult,
)
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.calls import CallFinder, MatchedCall
from verl_tool.servers.execution.current_trajectory import running_for
from verl_tool.servers.execution.live_states import LiveStates
from verl_tool.servers.execution.observation import (
    merge,
    not_run,
    not_understood,
    too_long,
    unrunnable,
    with_error_metric,
)
from verl_tool.servers.execution.trajectory_table import ServedTrajectory
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult
from verl_tool.util.deadline import Deadline
from verl_tool.util.json_text import excerpt
from verl_tool.verification import read_verification

log = logging.getLogger(__name__)

MAX_CALLS = 256
"""Most calls of one action that are run, where the server's config says nothing. Of more, one is refused for all."""
MAX_NAMES = 256
"""Most names in that list."""
MAX_ACTION_CHARACTERS = 384 << 10
"""Of an action; a longer one is not read. One search of a format in so many takes up to 40 ms, in which nothing else
of this process runs."""
MAX_CALL_CHARACTERS = 256 << 10
"""Of one call's text or arguments; a longer one is not run. To check and pass on so many takes some milliseconds."""
_LONG_CHARACTERS = 1 << 16
"""Observations that are longer together are rendered in a thread."""
_FIELDS: dict[type[MediaPart], str] = {ImagePart: IMAGES_FIELD, AudioPart: AUDIOS_FIELD}


class ToolCallFault(ToolFault):
    """A fault of one tool's call."""

    def __init__(self, tool: Tool, kind: FaultKind, message: str, retryable: bool) -> None:
        super().__init__(kind, message, retryable)
        self.tool = tool.name


class ActionRunner:
    """Runs actions of many trajectories with the same tools; one trajectory's actions one after the other."""

    def __init__(
        self,
        tools: Sequence[Tool],
        metrics: ToolMetrics,
        *,
        done_if_invalid: bool,
        max_calls: int | None,
        call_timeout_seconds: float,
    ) -> None:
        self._tools = tools
        self._by_name = {tool.name: tool for tool in tools}
        self._formats = {spec for tool in tools for fmt in tool.formats for spec in specs_of(fmt)}
        self._finder = CallFinder(tools)
        self._metrics = metrics
        self._done_if_invalid = done_if_invalid
        self._max_calls = min(max_calls or MAX_CALLS, MAX_CALLS)
        self._call_timeout = call_timeout_seconds
        self._groups: dict[str, list[str]] = {}
        for tool in tools:
            self._groups.setdefault(tool.state_group, []).append(tool.name)
        by_kind = {(kind, tool.state_group): tool for tool in tools for kind in tool.takes_media}
        self._tools_by_kind = [(kind, tool) for (kind, _), tool in by_kind.items()]
        """One tool of each state that knows the trajectory's images or audio."""
        bounded = [tool for tool in tools if tool.max_live is not None or tool.ttl_seconds is not None]
        self._live = {tool.state_group: LiveStates(tool) for tool in bounded}

    async def run(
        self,
        trajectory: ServedTrajectory,
        request: StepRequest,
        progress: list[ToolResult],
        admission: Admission | None,
    ) -> StepResult:
        """The answer to the action; a failure is the fault of this one answer, nothing is raised for it.

        `progress` holds the results of the calls that ran in an earlier attempt, and takes those of this one.
        """
        deadline = time.monotonic() + self._call_timeout
        try:
            with running_for(trajectory.id), Deadline(self._call_timeout):
                return await self._run_in_turn(trajectory, request, progress, admission, deadline)
        except asyncio.TimeoutError:
            words = f"the action took more than {self._call_timeout:g} s (call_timeout_seconds) and was stopped"
            fault = ToolFault(FaultKind.TIMEOUT, words, retryable=False)
        except ToolFault as error:
            fault = error
        except Exception as error:
            # Formats and `Tool.recognise` are anybody's code, and may raise anything.
            log.exception("the action of trajectory %s could not be read", trajectory.id)
            words = f"{type(error).__name__}: {error}; the traceback is in the server's log"
            fault = ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)
        # Without a record, a retry would run the action's earlier calls again.
        return self.faulted(request, fault, retryable=fault.retryable and not (progress and request.step is None))

    def faulted(self, request: StepRequest, fault: ToolFault, retryable: bool | None = None) -> StepResult:
        """`fault` as the answer, counted; `retryable` in place of the fault's own."""
        self._metrics.faulted(fault.kind, fault.tool if isinstance(fault, ToolCallFault) else NO_TOOL)
        wire = fault.as_fault() if retryable is None else fault.as_fault().model_copy(update={"retryable": retryable})
        return StepResult(request.trajectory_id, valid=False, fault=wire)

    async def end(self, trajectory: ServedTrajectory) -> None:
        """The trajectory is over: close its states, after what it runs now."""
        async with trajectory.lock:
            trajectory.over = True
            await self.free(trajectory)

    async def fork(self, source: ServedTrajectory, branch: ServedTrajectory) -> None:
        """Give `branch` copies of the states of `source`, after what that runs now.

        Raises ToolFault, ``not_forkable`` among others; `branch` has no state then.
        """
        async with source.lock:
            _reject_ended(source)
            try:
                with running_for(branch.id), Deadline(self._call_timeout):
                    await self._fork_states(source, branch)
            except asyncio.TimeoutError:
                await self.free(branch)
                words = f"the fork took more than {self._call_timeout:g} s (call_timeout_seconds) and was stopped"
                raise ToolFault(FaultKind.TIMEOUT, words, retryable=False) from None
            except BaseException:
                await self.free(branch)
                raise

    async def free(self, trajectory: ServedTrajectory) -> None:
        """Close all its states. A tool that fails to is logged: its trajectory is over either way."""
        states, trajectory.states = trajectory.states, {}
        # Tools of one group have the same state.
        held = {self._by_name[name].state_group: (self._by_name[name], state) for name, state in states.items()}
        for group, (tool, state) in held.items():
            if not tool.stateful:
                continue
            try:
                with running_for(trajectory.id), Deadline(self._call_timeout):
                    await tool.close_state(state)
            except Exception:
                # A tool is anybody's code, and may raise anything.
                log.exception("tool %s failed to close the state of trajectory %s", tool.name, trajectory.id)
            finally:
                if group in self._live:
                    self._live[group].release(trajectory)

    def expired(self) -> list[tuple[ServedTrajectory, str]]:
        """Trajectories that have been idle for longer than a tool lets them be, and why their state is lost."""
        return [
            (trajectory, f"it was idle for more than {live.ttl_seconds:g} s, which its tools allow (ttl_seconds)")
            for live in self._live.values()
            for trajectory in live.idle()
        ]

    async def _run_in_turn(
        self,
        trajectory: ServedTrajectory,
        request: StepRequest,
        progress: list[ToolResult],
        admission: Admission | None,
        deadline: float,
    ) -> StepResult:
        async with trajectory.lock:
            _reject_ended(trajectory)
            if VERIFY_FIELD in request.extra:
                return await self._verify(trajectory, request, admission, deadline)
            if FILES_FIELD in request.extra:
                await self._open(self._tool_with_workspace(FILES_FIELD), trajectory, request, admission, deadline)
            for kind, tool in self._tools_by_kind:
                if _FIELDS[kind] in request.extra:
                    await self._open(tool, trajectory, request, admission, deadline)
            requested, formats = self._requested_tools(request), self._requested_formats(request)
            if len(request.action) > MAX_ACTION_CHARACTERS:
                self._metrics.not_understood()
                tools = self._tools if requested is None else requested
                return too_long(request, tools, MAX_ACTION_CHARACTERS, self._done_if_invalid, formats)
            if request.extra.get(DIRECT_FIELD) is True:
                matched, unknown = self._finder.direct(request.action, requested)
            else:
                matched, unknown = await self._finder.find_async(request.action, requested, formats)
            # Each refusal costs as much as a call, and an action may hold tens of thousands.
            matched = matched[: MAX_CALLS + 1]
            if matched:
                async with admission.place(matched[0].tool.name) if admission else nullcontext():
                    await self._run_calls(matched, trajectory, request, progress, deadline)
                long = sum(len(each.text) for each in progress) > _LONG_CHARACTERS
                merging = partial(_merged, request, matched, progress)
                result = await asyncio.to_thread(merging) if long else merging()
            else:
                self._metrics.not_understood()
                tools = self._tools if requested is None else requested
                result = not_understood(request, tools, unknown, self._done_if_invalid, formats)
            if result.done and request.extra.get(KEEP_FIELD) is not True:
                trajectory.over = True
                await self.free(trajectory)
            return result

    async def _open(
        self,
        tool: Tool,
        trajectory: ServedTrajectory,
        request: StepRequest,
        admission: Admission | None,
        deadline: float,
    ) -> None:
        """Make the trajectory's state with the files, images or audio that have come, whatever it calls first."""
        async with admission.place(tool.name) if admission else nullcontext():
            try:
                await self._context(tool, trajectory, request, deadline)
            except SandboxError as error:
                raise ToolCallFault(tool, FaultKind.SANDBOX, str(error), error.retryable) from error

    async def _verify(
        self, trajectory: ServedTrajectory, request: StepRequest, admission: Admission | None, deadline: float
    ) -> StepResult:
        """What a verifier says of the trajectory's workspace."""
        tool = self._tool_with_workspace(VERIFY_FIELD)
        try:
            verification = await asyncio.to_thread(read_verification, request.extra[VERIFY_FIELD], VERIFY_FIELD)
        except ConfigError as error:
            raise ToolFault(FaultKind.BAD_REQUEST, str(error), retryable=False) from None
        async with admission.place(tool.name) if admission else nullcontext():
            try:
                context = await self._context(tool, trajectory, request, deadline)
                verdict = await tool.verify(context.state, verification)
            except SandboxError as error:
                raise ToolCallFault(tool, FaultKind.SANDBOX, str(error), retryable=False) from error
        return StepResult(trajectory.id, verdict.told, reward=verdict.reward, metrics=verdict.numbers or None)

    def _tool_with_workspace(self, field: str) -> Tool:
        """Raises ToolFault, not of a kind that a policy could bring about, if no tool has one."""
        tool = next((tool for tool in self._tools if tool.has_workspace), None)
        if tool is None:
            message = f"{field} needs a tool with a workspace; serve one, such as bash_terminal or ipython_code"
            raise ToolFault(FaultKind.SANDBOX, message, retryable=False)
        return tool

    async def _run_calls(
        self,
        matched: Sequence[MatchedCall],
        trajectory: ServedTrajectory,
        request: StepRequest,
        progress: list[ToolResult],
        deadline: float,
    ) -> None:
        """Run the calls that `progress` does not hold yet, up to one that ends the trajectory; those beyond the
        greatest number for one action are answered with a refusal."""
        for slot in range(len(progress), len(matched)):
            if progress and progress[-1].done:
                return
            # A call may compute for milliseconds, and an action holds hundreds: other trajectories have their turn.
            await asyncio.sleep(0)
            if slot >= self._max_calls:
                progress.append(not_run(self._max_calls))
            else:
                result = _bounded(await self._run_call(matched[slot], trajectory, request, deadline), progress)
                progress.append(result)
                await self._show(result, trajectory, request, deadline)

    async def _run_call(
        self, match: MatchedCall, trajectory: ServedTrajectory, request: StepRequest, deadline: float
    ) -> ToolResult:
        tool, call = match.tool, match.call
        if call.error is not None:
            self._metrics.not_understood(tool.name)
            return unrunnable(call.error)
        if len(call.input) > MAX_CALL_CHARACTERS:
            self._metrics.not_understood(tool.name)
            words = f"the call has {len(call.input)} characters, and at most {MAX_CALL_CHARACTERS} are run"
            return unrunnable(f"{words}; split it into several")
        began = time.perf_counter()
        try:
            result = await tool.run(call, await self._context(tool, trajectory, request, deadline))
            if not isinstance(result, ToolResult):
                raise TypeError(f"run returned {type(result).__name__}; a tool returns ToolResult")
        except InvalidCall as error:
            self._metrics.not_understood(tool.name)
            return unrunnable(str(error))
        except Exception as error:
            raise _as_fault(tool, trajectory, error) from error
        self._metrics.called(tool.name, time.perf_counter() - began, valid=result.valid, error=result.error)
        return with_error_metric(result)

    async def _show(
        self, result: ToolResult, trajectory: ServedTrajectory, request: StepRequest, deadline: float
    ) -> None:
        """Tell the states that know the trajectory's images and audio of those of a result."""
        for kind, tool in self._tools_by_kind:
            if media := [part for part in result.parts if isinstance(part, kind)]:
                tool.take_media((await self._context(tool, trajectory, request, deadline)).state, media)

    async def _context(
        self, tool: Tool, trajectory: ServedTrajectory, request: StepRequest, deadline: float
    ) -> Context:
        """Who calls `tool`; a state is made at the trajectory's first call."""
        context = Context(trajectory.id, request.step, None, request.extra, request.is_last_step, deadline)
        if tool.name not in trajectory.states:
            trajectory.states[tool.name] = await self._state(tool, trajectory, context)
        if tool.state_group in self._live:
            self._live[tool.state_group].touch(trajectory)
        context.state = trajectory.states[tool.name]
        return context

    async def _state(self, tool: Tool, trajectory: ServedTrajectory, context: Context) -> Any:
        """What a tool keeps for a trajectory that has not called it yet: its group's state, or a new one."""
        if not tool.stateful:
            return None
        for name in self._groups[tool.state_group]:
            if name in trajectory.states:
                return trajectory.states[name]
        live = self._live.get(tool.state_group)
        if live is None:
            return await tool.new_state(context)
        live.take(trajectory)
        try:
            return await tool.new_state(context)
        except BaseException:
            live.release(trajectory)
            raise

    async def _fork_states(self, source: ServedTrajectory, branch: ServedTrajectory) -> None:
        copies: dict[str, Any] = {}
        for name, state in source.states.items():
            tool = self._by_name[name]
            if tool.stateful and tool.state_group not in copies:
                copies[tool.state_group] = await self._fork_state(tool, state, branch)
            branch.states[name] = copies.get(tool.state_group)

    async def _fork_state(self, tool: Tool, state: Any, branch: ServedTrajectory) -> Any:
        live = self._live.get(tool.state_group)
        if live is not None:
            live.take(branch)
        try:
            return await tool.fork_state(state)
        except BaseException as error:
            if live is not None:
                live.release(branch)
            if not isinstance(error, Exception):
                raise
            raise _as_fault(tool, branch, error) from error

    def _requested_tools(self, request: StepRequest) -> Sequence[Tool] | None:
        """The tools that the request allows; None: all."""
        name, names = request.extra.get(TOOL_FIELD), request.extra.get(TOOLS_FIELD)
        if name is not None:
            return [self._known_tool(TOOL_FIELD, name)]
        if names is None:
            return None
        if not isinstance(names, list) or len(names) > MAX_NAMES:
            message = f"{TOOLS_FIELD} is {excerpt(names)}; send a list of at most {MAX_NAMES} names"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        return [self._known_tool(TOOLS_FIELD, each) for each in names]

    def _requested_formats(self, request: StepRequest) -> frozenset[str] | None:
        """Names of the formats that the request allows; None: all."""
        names = request.extra.get(FORMATS_FIELD)
        if names is None:
            return None
        if not isinstance(names, list) or len(names) > MAX_NAMES or not all(isinstance(each, str) for each in names):
            message = f"{FORMATS_FIELD} is {excerpt(names)}; send a list of at most {MAX_NAMES} names"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        if self._formats.isdisjoint(names):
            message = (
                f"no tool is called in {FORMATS_FIELD} {excerpt(names)}; known: {', '.join(sorted(self._formats))}"
            )
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        return frozenset(names)

    def _known_tool(self, field: str, name: object) -> Tool:
        tool = self._by_name.get(name) if isinstance(name, str) else None
        if tool is None:
            message = f"{field} {excerpt(name)} is unknown; known: {', '.join(self._by_name)}"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        return tool


def _as_fault(tool: Tool, trajectory: ServedTrajectory, error: Exception) -> ToolCallFault:
    """What a tool has raised. It is anybody's code, and may raise anything: the fault of this trajectory alone."""
    if isinstance(error, ToolFault):
        return ToolCallFault(tool, error.kind, error.message, error.retryable)
    if isinstance(error, SandboxError):
        return ToolCallFault(tool, FaultKind.SANDBOX, str(error), error.retryable)
    log.error("tool %s crashed on trajectory %s", tool.name, trajectory.id, exc_info=error)
    words = f"tool {tool.name}: {type(error).__name__}: {error}; the traceback is in the server's log"
    return ToolCallFault(tool, FaultKind.TOOL_CRASHED, words, retryable=False)


def _bounded(result: ToolResult, earlier: Sequence[ToolResult]) -> ToolResult:
    """`result`, or an error in place of what is too much beside the `earlier` ones of the same action: that is the
    model's doing, and what is too much by itself is the tool's."""
    if not (result.parts and any(each.parts for each in earlier)):
        return result
    try:
        reject_too_much(as_parts(part for each in (*earlier, result) for part in each.parts))
    except ContentError as error:
        return with_error_metric(ToolResult(f"Error: {error}, or make further calls in your next turn.", error=True))
    return result


def _merged(request: StepRequest, matched: Sequence[MatchedCall], progress: Sequence[ToolResult]) -> StepResult:
    try:
        return merge(request.trajectory_id, matched, progress)
    except ContentError as error:
        raise ToolCallFault(matched[0].tool, FaultKind.TOOL_CRASHED, str(error), retryable=False) from error


def _reject_ended(trajectory: ServedTrajectory) -> None:
    """Refuse an action that waited for its turn while an earlier one ended the trajectory."""
    if trajectory.over or trajectory.closed:
        message = f"trajectory {trajectory.id[:80]!r} ended while this action waited for its turn"
        raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
