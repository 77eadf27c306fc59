"""Run one action: find its calls, run them in order with their tools, and return an answer in every case."""

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
    ENVIRONMENT_FIELD,
    FILES_FIELD,
    FORMATS_FIELD,
    IMAGES_FIELD,
    KEEP_FIELD,
    TOOL_FIELD,
    TOOLS_FIELD,
    VERDICT_FIELD,
    VERIFY_FIELD,
    WORKSPACE_IMAGE_FIELD,
    WORKSPACE_LIMITS_FIELD,
    FaultKind,
    StepRequest,
    StepResult,
)
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.calls import CallFinder, MatchedCall, claim_turn
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
from verl_tool.util.slots import hold_slot, pause_in_queue
from verl_tool.verification import read_environment_verification, read_verification

log = logging.getLogger(__name__)

MAX_CALLS = 256
"""Maximum number of calls per action, unless the server's config sets a lower one."""
MAX_NAMES = 256
"""Maximum number of names in a request's list of tools or formats."""
MAX_ACTION_CHARACTERS = 384 << 10
"""Longer actions are rejected. Searching this many characters for one format blocks the process for up to 40 ms."""
MAX_CALL_CHARACTERS = 256 << 10
"""Longer calls are rejected. Checking and passing on this many characters takes a few milliseconds."""
_LONG_CHARACTERS = 1 << 16
"""Observations that are longer in total are rendered in a thread."""
_FIELDS: dict[type[MediaPart], str] = {ImagePart: IMAGES_FIELD, AudioPart: AUDIOS_FIELD}


class ToolCallFault(ToolFault):
    """A fault in a call of one tool."""

    def __init__(self, tool: Tool, kind: FaultKind, message: str, retryable: bool) -> None:
        super().__init__(kind, message, retryable)
        self.tool = tool.name


class ActionRunner:
    """Runs the actions of many trajectories with the same tools. Those of one trajectory run one after the other."""

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
        """For each state that takes the trajectory's images or audio, one of its tools."""
        bounded = [tool for tool in tools if tool.max_live is not None or tool.ttl_seconds is not None]
        self._live = {tool.state_group: LiveStates(tool) for tool in bounded}

    async def run(
        self,
        trajectory: ServedTrajectory,
        request: StepRequest,
        progress: list[ToolResult],
        admission: Admission | None,
    ) -> StepResult:
        """Run the action and return its answer. A failure becomes the fault of the answer and is not raised.

        `progress` contains the results of calls that ran in an earlier attempt. Those of this attempt are appended.
        """
        deadline = Deadline(self._call_timeout)
        try:
            with running_for(trajectory.id), deadline, pause_in_queue(deadline, trajectory):
                return await self._run_in_turn(trajectory, request, progress, admission, deadline)
        except asyncio.TimeoutError:
            words = f"the action took more than {deadline.seconds:g} s (call_timeout_seconds) and was stopped"
            fault = ToolFault(FaultKind.TIMEOUT, words, retryable=False)
        except ToolFault as error:
            fault = error
        except Exception as error:
            # Formats and `Tool.recognise` are users' code and may raise any exception.
            log.exception("the action of trajectory %s could not be read", trajectory.id)
            words = f"{type(error).__name__}: {error}; the traceback is in the server's log"
            fault = ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)
        # Without a record, a retry would run the action's earlier calls again.
        return self.answer_fault(request, fault, retryable=fault.retryable and not (progress and request.step is None))

    def answer_fault(self, request: StepRequest, fault: ToolFault, retryable: bool | None = None) -> StepResult:
        """Count `fault` in the metrics and return it as the answer. `retryable` overrides that of the fault."""
        self._metrics.faulted(fault.kind, fault.tool if isinstance(fault, ToolCallFault) else NO_TOOL)
        wire = fault.as_fault() if retryable is None else fault.as_fault().model_copy(update={"retryable": retryable})
        return StepResult(request.trajectory_id, valid=False, fault=wire)

    async def end(self, trajectory: ServedTrajectory) -> None:
        """End the trajectory and close its states, after the action in progress."""
        async with trajectory.lock:
            trajectory.over = True
            await self.free(trajectory)

    async def fork(self, source: ServedTrajectory, branch: ServedTrajectory) -> None:
        """Copy the states of `source` to `branch`, after the action in progress.

        Raises ToolFault, for example ``not_forkable``. `branch` has no state then.
        """
        async with source.lock:
            _check_not_ended(source)
            try:
                deadline = Deadline(self._call_timeout)
                with running_for(branch.id), deadline, pause_in_queue(deadline):
                    await self._fork_states(source, branch)
            except asyncio.TimeoutError:
                await self.free(branch)
                words = f"the fork took more than {self._call_timeout:g} s (call_timeout_seconds) and was stopped"
                raise ToolFault(FaultKind.TIMEOUT, words, retryable=False) from None
            except BaseException:
                await self.free(branch)
                raise

    async def free(self, trajectory: ServedTrajectory) -> None:
        """Close all states of a trajectory. The failure of a tool is logged and does not stop the others."""
        states, trajectory.states = trajectory.states, {}
        # Tools of one group share a state.
        by_group = {self._by_name[name].state_group: (self._by_name[name], state) for name, state in states.items()}
        for group, (tool, state) in by_group.items():
            if not tool.stateful:
                continue
            try:
                with running_for(trajectory.id), Deadline(self._call_timeout):
                    await tool.close_state(state)
            except Exception:
                # Tools are users' code and may raise any exception.
                log.exception("tool %s failed to close the state of trajectory %s", tool.name, trajectory.id)
            finally:
                if group in self._live:
                    self._live[group].release(trajectory)

    def expired(self) -> list[tuple[ServedTrajectory, str]]:
        """Return the trajectories that exceeded the idle time of a tool, each with the reason why its state is lost."""
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
        deadline: Deadline,
    ) -> StepResult:
        async with trajectory.lock:
            _check_not_ended(trajectory)
            if VERIFY_FIELD in request.extra:
                return await self._verify(trajectory, request, admission, deadline)
            if VERDICT_FIELD in request.extra:
                return await self._judge(trajectory, request, admission)
            for name in (FILES_FIELD, WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD):
                if request.extra.get(name) is not None:
                    await self._open(self._tool_with_workspace(name), trajectory, request, admission, deadline)
            for kind, tool in self._tools_by_kind:
                if _FIELDS[kind] in request.extra:
                    await self._open(tool, trajectory, request, admission, deadline)
            if ENVIRONMENT_FIELD in request.extra:
                return await self._begin(trajectory, request, admission, deadline)
            environment = self._environment_of(trajectory)
            opening = None if environment is None else environment.opening(trajectory.states[environment.name])
            requested, formats = self._requested_tools(request), self._requested_formats(request)
            if len(request.action) > MAX_ACTION_CHARACTERS:
                self._metrics.not_understood()
                tools = self._tools if requested is None else requested
                return too_long(request, tools, MAX_ACTION_CHARACTERS, self._done_if_invalid, formats)
            if request.extra.get(DIRECT_FIELD) is True:
                matched, unknown = self._finder.direct(request.action, requested)
            else:
                matched, unknown = await self._finder.find_async(request.action, requested, formats)
            if environment is not None and opening is not None:
                if request.extra.get(DIRECT_FIELD) is True:
                    opening = opening.model_copy(update={"every_turn": False})
                matched = claim_turn(environment, opening, request.action, matched, unknown)
            # Rejecting a call costs as much as running one, and an action may contain tens of thousands.
            matched = matched[: MAX_CALLS + 1]
            if matched and matched[0].tool.has_workspace and matched[0].call.error is None:
                try:
                    await self._context(matched[0].tool, trajectory, request, deadline)
                except Exception as error:
                    raise _as_fault(matched[0].tool, trajectory, error) from error
            if matched:
                async with admission.place(matched[0].tool.name) if admission else nullcontext():
                    await self._run_calls(matched, trajectory, request, progress, deadline)
                long = sum(len(each.text) for each in progress) > _LONG_CHARACTERS
                merge_all = partial(_merge, request, matched, progress)
                result = await asyncio.to_thread(merge_all) if long else merge_all()
            else:
                self._metrics.not_understood()
                tools = self._tools if requested is None else requested
                described = () if opening is None else opening.tools
                result = not_understood(request, tools, unknown, self._done_if_invalid, formats, described)
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
        deadline: Deadline,
    ) -> None:
        """Make the trajectory's state with the files, images or audio of the request, whatever tool it calls first.

        A workspace takes no slot of `admission`: starts of sandboxes have a queue of their own.
        """
        async with admission.place(tool.name) if admission and not tool.has_workspace else nullcontext():
            try:
                await self._context(tool, trajectory, request, deadline)
            except SandboxError as error:
                raise ToolCallFault(tool, FaultKind.SANDBOX, str(error), error.retryable) from error

    async def _verify(
        self, trajectory: ServedTrajectory, request: StepRequest, admission: Admission | None, deadline: Deadline
    ) -> StepResult:
        """Run a verifier in the trajectory's workspace and return its verdict."""
        tool = self._tool_with_workspace(VERIFY_FIELD)
        try:
            verification = await asyncio.to_thread(read_verification, request.extra[VERIFY_FIELD], VERIFY_FIELD)
        except ConfigError as error:
            raise ToolFault(FaultKind.BAD_REQUEST, str(error), retryable=False) from None
        # A verifier may run longer than a call.
        deadline.extend(max(0.0, verification.max_seconds - deadline.seconds))
        try:
            context = await self._context(tool, trajectory, request, deadline)
            with pause_in_queue(*tool.pausable(context.state)):
                async with (
                    hold_slot(tool.verification_slots) if tool.verification_slots else nullcontext(),
                    admission.place(tool.name) if admission else nullcontext(),
                ):
                    verdict = await tool.verify(context.state, verification)
        except SandboxError as error:
            raise ToolCallFault(tool, FaultKind.SANDBOX, str(error), retryable=False) from error
        return StepResult(trajectory.id, verdict.told, reward=verdict.reward, metrics=verdict.numbers or None)

    async def _begin(
        self, trajectory: ServedTrajectory, request: StepRequest, admission: Admission | None, deadline: Deadline
    ) -> StepResult:
        """Begin the trajectory in the environment that the request names, and return its opening."""
        tool = self._requested_environment(request)
        async with admission.place(tool.name) if admission else nullcontext():
            try:
                opening = tool.opening((await self._context(tool, trajectory, request, deadline)).state)
            except Exception as error:
                raise _as_fault(tool, trajectory, error) from error
        text = "\n\n".join(str(message.get("content") or "") for message in opening.messages)
        return StepResult(trajectory.id, text, opening=opening)

    async def _judge(
        self, trajectory: ServedTrajectory, request: StepRequest, admission: Admission | None
    ) -> StepResult:
        """Return the verdict of the trajectory's environment."""
        tool = self._environment_of(trajectory)
        if tool is None:
            message = f"{VERDICT_FIELD} needs a trajectory that began with {ENVIRONMENT_FIELD}"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        try:
            verification = read_environment_verification(request.extra[VERDICT_FIELD], VERDICT_FIELD)
        except ConfigError as error:
            raise ToolFault(FaultKind.BAD_REQUEST, str(error), retryable=False) from None
        async with admission.place(tool.name) if admission else nullcontext():
            try:
                verdict = await tool.judge(trajectory.states[tool.name], request.action, verification)
            except Exception as error:
                raise _as_fault(tool, trajectory, error) from error
        return StepResult(
            trajectory.id, verdict.told, reward=verdict.reward, metrics=verdict.numbers or None, fault=verdict.fault
        )

    def _environment_of(self, trajectory: ServedTrajectory) -> Tool | None:
        """Return the environment in which the trajectory began."""
        return next((self._by_name[name] for name in trajectory.states if self._by_name[name].is_environment), None)

    def _requested_environment(self, request: StepRequest) -> Tool:
        """Return the environment that a request names, or the only one. Raises ToolFault if it names none of them."""
        served = {tool.name: tool for tool in self._tools if tool.is_environment}
        arguments = request.extra[ENVIRONMENT_FIELD]
        if not isinstance(arguments, dict):
            message = f"{ENVIRONMENT_FIELD} is {excerpt(arguments)}; send an object, {{}} if there is nothing to say"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        name = arguments.get("name")
        tool = served.get(name) if isinstance(name, str) else None
        if name is None and len(served) == 1:
            tool = next(iter(served.values()))
        if tool is None:
            known = ", ".join(served) or "none; serve one, such as --tool_type openenv"
            message = f"{ENVIRONMENT_FIELD}.name is {excerpt(name)}; environments of this server: {known}"
            raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)
        return tool

    def _tool_with_workspace(self, field: str) -> Tool:
        """Return the first tool with a workspace.

        Raises ToolFault if there is none, of the kind ``sandbox``: it is no fault of the policy.
        """
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
        deadline: Deadline,
    ) -> None:
        """Run the calls that `progress` does not contain yet, up to one that ends the trajectory. Calls beyond the
        maximum number per action are answered with an error."""
        for slot in range(len(progress), len(matched)):
            if progress and progress[-1].done:
                return
            # A call may compute for milliseconds, and an action contains hundreds: let other trajectories run.
            await asyncio.sleep(0)
            if slot >= self._max_calls:
                progress.append(not_run(self._max_calls))
            else:
                result = _limit_parts(await self._run_call(matched[slot], trajectory, request, deadline), progress)
                progress.append(result)
                await self._pass_media_on(result, trajectory, request, deadline)

    async def _run_call(
        self, match: MatchedCall, trajectory: ServedTrajectory, request: StepRequest, deadline: Deadline
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

    async def _pass_media_on(
        self, result: ToolResult, trajectory: ServedTrajectory, request: StepRequest, deadline: Deadline
    ) -> None:
        """Pass the images and audio of a result on to the states that take them."""
        for kind, tool in self._tools_by_kind:
            if media := [part for part in result.parts if isinstance(part, kind)]:
                tool.take_media((await self._context(tool, trajectory, request, deadline)).state, media)

    async def _context(
        self, tool: Tool, trajectory: ServedTrajectory, request: StepRequest, deadline: Deadline
    ) -> Context:
        """Return the context of a call of `tool`. A state is made at the trajectory's first call."""
        context = Context(trajectory.id, request.step, None, request.extra, request.is_last_step, action=request.action)
        context.deadline = time.monotonic() + deadline.remaining_seconds
        if tool.name not in trajectory.states:
            trajectory.states[tool.name] = await self._state(tool, trajectory, context)
            context.deadline = time.monotonic() + deadline.remaining_seconds
        if tool.state_group in self._live:
            self._live[tool.state_group].touch(trajectory)
        context.state = trajectory.states[tool.name]
        return context

    async def _state(self, tool: Tool, trajectory: ServedTrajectory, context: Context) -> Any:
        """Return the state of a tool that the trajectory calls for the first time: its group's, or a new one."""
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
        """Return the tools that the request allows, None for all."""
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
        """Return the names of the formats that the request allows, None for all."""
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
    """Convert an exception of a tool, which is users' code, to a fault of this trajectory."""
    if isinstance(error, ToolFault):
        return ToolCallFault(tool, error.kind, error.message, error.retryable)
    if isinstance(error, SandboxError):
        return ToolCallFault(tool, FaultKind.SANDBOX, str(error), error.retryable)
    log.error("tool %s crashed on trajectory %s", tool.name, trajectory.id, exc_info=error)
    words = f"tool {tool.name}: {type(error).__name__}: {error}; the traceback is in the server's log"
    return ToolCallFault(tool, FaultKind.TOOL_CRASHED, words, retryable=False)


def _limit_parts(result: ToolResult, earlier: Sequence[ToolResult]) -> ToolResult:
    """Return `result`, or an error if its parts and those of the action's `earlier` results exceed the limits.

    Exceeding them with several calls is an error of the model. A single result that does is a fault of the tool.
    """
    if not (result.parts and any(each.parts for each in earlier)):
        return result
    try:
        reject_too_much(as_parts(part for each in (*earlier, result) for part in each.parts))
    except ContentError as error:
        return with_error_metric(ToolResult(f"Error: {error}, or make further calls in your next turn.", error=True))
    return result


def _merge(request: StepRequest, matched: Sequence[MatchedCall], progress: Sequence[ToolResult]) -> StepResult:
    try:
        return merge(request.trajectory_id, matched, progress)
    except ContentError as error:
        raise ToolCallFault(matched[0].tool, FaultKind.TOOL_CRASHED, str(error), retryable=False) from error


def _check_not_ended(trajectory: ServedTrajectory) -> None:
    """Raise ToolFault if an earlier action ended the trajectory while this one waited for its turn."""
    if trajectory.over or trajectory.closed:
        message = f"trajectory {trajectory.id[:80]!r} ended while this action waited for its turn"
        raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
