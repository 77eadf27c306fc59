"""Call the tools for a trajectory: run its actions, have it verified, and release its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from verl_tool.agent_loop.actions import Action
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.row import is_present
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder, now
from verl_tool.content.parts import ImagePart, parts_of, tagged, to_wire
from verl_tool.errors import ConfigError, ContentError, ToolFault
from verl_tool.protocol import (
    FORMATS_FIELD,
    IMAGES_FIELD,
    SENT_ONCE,
    TURNS_LEFT_FIELD,
    VERDICT_FIELD,
    VERIFY_FIELD,
    Fault,
    FaultKind,
    Opening,
    StepResult,
)
from verl_tool.verification import AnyVerification, EnvironmentVerification, Verdict, Verification, caller_seconds

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long the loop waits beyond `tool_call_timeout`, so that the client can report the timeout itself."""
RELEASE_SECONDS = 10.0
"""Deadline of the request that releases a trajectory's state."""


class Tools(Protocol):
    """The interface between the loop and the tools. `verl_tool.client.ToolClient` implements it.

    Implementations retry; the loop never does, because two layers of retries would multiply.
    """

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        """Run one action. A failure of the infrastructure is returned in `StepResult.fault` or raised as ToolFault.

        With `finish`, the trajectory has ended: its state may be freed, and the action is not run.
        """
        ...


def queue_timeout_of(tools: Tools | None) -> float:
    """Return the seconds that a call may take longer because it waits in a queue of a server."""
    return float(getattr(tools, "queue_timeout", 0.0))


class ToolChannel:
    """Sends the actions of an Episode's trajectories to its tools."""

    def __init__(
        self, tools: Tools | None, options: EpisodeOptions, format_names: Sequence[str] | None, *, reads_images: bool
    ) -> None:
        """`format_names` restricts the formats in which the tools look for calls; None allows all formats."""
        self.tools = tools
        self._options, self._reads_images = options, reads_images
        self._format_names = {FORMATS_FIELD: list(format_names)} if format_names else {}
        self._releases: set[asyncio.Task[None]] = set()
        self._answered_in_text = False
        """Whether any call was answered without unsupported media."""

    async def aclose(self) -> None:
        """Wait until the states of cancelled and failed trajectories are freed (at most `RELEASE_SECONDS`)."""
        if self._releases:
            await asyncio.wait(set(self._releases))

    async def call(
        self, builder: TrajectoryBuilder, action: Action, turns_left: int, *, is_last: bool, opens: bool = False
    ) -> StepResult:
        """Run one action and record the answer. Raises ToolFault if there is no answer."""
        started = now()
        builder.calling = True
        result = await self._send(builder, action.text, turns_left, is_last)
        builder.calling = False
        seconds = now() - started
        try:
            result = self._drop_unreadable_media(action, result)
        except ToolFault as error:  # what the call made, so the record has it
            result = replace(result, image=None, audio=None, done=False, reward=None, fault=error.as_fault())
        builder.record(action, result, seconds, opens=opens)
        if result.fault is not None:
            fault = result.fault
            raise ToolFault(fault.kind, fault.message, fault.retryable, builder.trajectory_id)
        return result

    def _drop_unreadable_media(self, action: Action, result: StepResult) -> StepResult:
        """Decode the images of an answer, and drop media that the model cannot read: audio, and images if it reads text
        only. The observation and the metrics say what was dropped.

        Raises ConfigError if no call was answered in readable form before: then the tools do not fit the model. After
        that the policy may have caused it, and a policy must not be able to end the run. Raises ToolFault for an image
        that cannot be decoded.
        """
        image = ("an image", None if self._reads_images else result.image)
        media = [name for name, held in (image, ("audio", result.audio)) if is_present(held)]
        if not media:
            self._answered_in_text |= result.valid and result.fault is None
            return _with_images(result) if self._reads_images else result
        carried = "text and images" if self._reads_images else "text"
        description = (
            f"{_describe_tool(action)} answered with {' and '.join(media)}, and this loop carries {carried} only"
        )
        if not self._answered_in_text:
            raise ConfigError(
                f"{description}: the model would go on without having seen it. Serve tools that answer in text"
            )
        logger.warning("%s: it was left out, and the observation says so", description)
        left = replace(
            result,
            observation=f"{result.observation}[{' and '.join(media)} was left out: only {carried} can be read here]",
            image=result.image if self._reads_images else None,
            audio=None,
            metrics={**(result.metrics or {}), "error": 1.0, "media_excluded": 1.0},
        )
        return _with_images(left) if self._reads_images else left

    async def begin(self, builder: TrajectoryBuilder, turns_left: int) -> Opening:
        """Begin the trajectory in its environment. Raises ToolFault if it cannot, which is no fault of the policy."""
        opening = (await self.call(builder, Action(), turns_left, is_last=False, opens=True)).opening
        if opening is None:
            message = "the tool server has no environments (its answer has no 'opening'); serve one, or update it"
            raise ToolFault(FaultKind.MISCONFIGURED, message, False, builder.trajectory_id)
        return opening

    async def verify(self, builder: TrajectoryBuilder, verification: AnyVerification) -> None:
        """Have the workspace or the environment judged and record the verdict. The model does not see any of it."""
        started = now()
        builder.calling = True  # the server keeps state for the verifier even if a call ended the trajectory
        text = "" if isinstance(verification, Verification) else builder.unsent_text
        field = VERIFY_FIELD if isinstance(verification, Verification) else VERDICT_FIELD
        builder.extra[field] = verification.model_dump(mode="json")
        result = await self._send(builder, text, 0, True)
        builder.verdict = Verdict(
            result.reward if result.fault is None else None,
            result.observation,
            dict(result.metrics or {}),
            result.fault,
            now() - started,
            by_environment=isinstance(verification, EnvironmentVerification),
        )

    def reject_verification(self, verification: AnyVerification, uses_tools: bool) -> None:
        """Raise ConfigError if the verifier cannot be run."""
        if not uses_tools:
            where = "in a workspace" if isinstance(verification, Verification) else "by an environment"
            raise ConfigError(f"this row is verified {where}, and uses no tools; set use_tool=True and enable_agent")

    async def _send(self, builder: TrajectoryBuilder, action: str, turns_left: int, is_last: bool) -> StepResult:
        assert self.tools is not None  # Episode.run() rejects a row that uses tools without any
        once = {name: builder.extra.pop(name, None) for name in SENT_ONCE}
        once[IMAGES_FIELD] = await _encode_images(once[IMAGES_FIELD])
        first = {name: value for name, value in once.items() if value is not None}
        seconds = caller_seconds(builder.extra.get(VERIFY_FIELD), self._options.tool_call_timeout)
        deadline = seconds + queue_timeout_of(self.tools) + GRACE_SECONDS
        try:
            return await asyncio.wait_for(
                self.tools.call(
                    builder.trajectory_id,
                    action,
                    step=len(builder.sent_calls),
                    extra={**builder.extra, **first, **self._format_names, TURNS_LEFT_FIELD: turns_left},
                    is_last_step=is_last,
                ),
                deadline,
            )
        except asyncio.TimeoutError:
            message = f"no answer within tool_call_timeout={self._options.tool_call_timeout} s (in all {deadline:g} s)"
            fault = Fault(kind=FaultKind.TIMEOUT, message=message, retryable=False)
        except ToolFault as raised:
            fault = raised.as_fault()
        return StepResult(builder.trajectory_id, fault=fault)

    async def release(self, builder: TrajectoryBuilder) -> None:
        """Let the tool server free a trajectory's state. If the request fails, the server evicts the state later."""
        if self.tools is None or not builder.has_server_state:
            return
        try:
            await asyncio.wait_for(self.tools.call(builder.trajectory_id, "", finish=True), RELEASE_SECONDS)
        except (asyncio.TimeoutError, ToolFault) as error:
            logger.debug("the tool server could not release trajectory %s: %s", builder.trajectory_id, error)

    def release_later(self, builder: TrajectoryBuilder) -> None:
        """Start `release` as a task, which `aclose` waits for."""
        task = asyncio.get_running_loop().create_task(self.release(builder))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


async def _encode_images(images: object) -> object:
    """Encode a prompt's image parts for the wire; anything else is sent unchanged."""
    parts = images if isinstance(images, (list, tuple)) else ()
    if not any(isinstance(part, ImagePart) for part in parts):
        return images
    return await asyncio.to_thread(lambda: [to_wire(part) if isinstance(part, ImagePart) else part for part in parts])


def _with_images(result: StepResult) -> StepResult:
    """Decode the images of an answer, as many as its text has tags. Raises ToolFault if one cannot be decoded."""
    if not is_present(result.image):
        return replace(result, image=None)
    try:
        text, images, _ = tagged(parts_of(result.observation, result.image))
    except ContentError as error:
        raise ToolFault(FaultKind.TOOL_CRASHED, str(error), False, result.trajectory_id) from error
    return replace(result, observation=text, image=images)


def _describe_tool(action: Action) -> str:
    """Name the tool that an action calls, for a message."""
    names = [call.name for call in action.sent_calls if call.name]
    return f"the tool {names[0]!r}" if names else f"the tool that was called by {action.text[-200:]!r}"
