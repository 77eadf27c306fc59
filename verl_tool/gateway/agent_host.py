"""Runs the agent program for one row of the data set, in training and in evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from verl_tool.agent_loop.row import is_present, text_messages
from verl_tool.agent_loop.trajectory import Excluded, Trajectory
from verl_tool.content.packed_files import unpack
from verl_tool.errors import ConfigError, SandboxError
from verl_tool.gateway.agent_program import AgentProgram, ProgramResult, SessionAddress, run_program
from verl_tool.gateway.inside.environment_program import MISCONFIGURED
from verl_tool.gateway.program.container_program import ProgramContainers
from verl_tool.gateway.program.session_socket import listen_for
from verl_tool.gateway.program.workspace_verifier import WorkspaceCopy, WorkspaceVerifier
from verl_tool.gateway.session import AgentSession, with_fault
from verl_tool.protocol import (
    ENVIRONMENT_FIELD,
    FILES_FIELD,
    WORKSPACE_IMAGE_FIELD,
    WORKSPACE_LIMITS_FIELD,
    Fault,
    FaultKind,
)
from verl_tool.sandbox.backends.providers import find_provider
from verl_tool.sandbox.sandboxed_service import ServiceSandbox
from verl_tool.verification import AnyVerification, EnvironmentVerification, Verdict, Verification, reward_in
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

PROGRAM = "agent_program"
"""Of a record's ``extra``: how the program ended."""


@dataclass(frozen=True)
class AgentTask:
    """What a row of the data set gives the program."""

    text: str
    """The last message."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """For its working directory, by path."""
    executable: tuple[str, ...] = ()
    """Those of `files` that are programs."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The whole conversation; empty: the text is all. No other column: it may hold the answer."""
    image: str | None = None
    """Its own image, in place of the program's."""
    limits: WorkspaceLimits = NO_LIMITS
    """Of its container, in place of the program's."""
    verification: Verification | None = None
    """What checks its working directory at the end. It does not reach the program."""
    environment: Mapping[str, Any] | None = None
    """What a program that judges plays in."""

    @classmethod
    def of_row(
        cls,
        messages: Sequence[Mapping[str, Any]],
        sent: Mapping[str, Any],
        verification: AnyVerification | None,
        where: str,
        *,
        judges: bool = False,
    ) -> AgentTask:
        """sent: its ``tools_kwargs``, as `build_call_extra` gives them. judges: the program plays in environments.
        Raises ConfigError for a row without text, with an image that is no name, with limits that are none, and if only
        one of row and program is for an environment."""
        environment, image, files = (sent.get(name) for name in (ENVIRONMENT_FIELD, WORKSPACE_IMAGE_FIELD, FILES_FIELD))
        if environment is not None and not judges:
            words = "it takes the agent loop, or a program that judges (gateway.program.preset=verifiers)"
            raise ConfigError(f"{where} has tools_kwargs.environment, which gateway.program does not play in; {words}")
        if judges and environment is None:
            raise ConfigError(f"{where} has no tools_kwargs.environment, which gateway.program is to play in")
        if isinstance(verification, EnvironmentVerification):
            if verification.data:
                raise ConfigError(f"{where}: the program judges by what it has; leave reward_model.ground_truth empty")
            verification = None
        texts = text_messages(messages, where)
        unpacked = unpack(files) if is_present(files) else {}
        if image is not None and not (isinstance(image, str) and image):
            raise ConfigError(
                f"{where}: tools_kwargs.{WORKSPACE_IMAGE_FIELD}={image!r:.100} is not the name of an image"
            )
        limits = WorkspaceLimits.parse(
            sent.get(WORKSPACE_LIMITS_FIELD), f"{where}: tools_kwargs.{WORKSPACE_LIMITS_FIELD}"
        )
        contents = {name: file.content for name, file in unpacked.items()}
        executable = tuple(name for name, file in unpacked.items() if file.executable)
        return cls(str(texts[-1]["content"]), contents, executable, texts, image, limits, verification, environment)


@dataclass(frozen=True)
class FinishedSession:
    """What a gateway gives at the end of a session."""

    rollout: Trajectory
    num_requests: int
    """For answers, that the model was asked for."""


async def finish_session(session: AgentSession) -> FinishedSession:
    """Finish a session of this process's gateway."""
    return FinishedSession(await session.finish(), session.num_requests)


class AgentHost:
    """The sandbox of a process's agent programs, and `app`, the model routes of their sessions, each on its own Unix
    socket."""

    def __init__(self, app: ASGIApp, program: AgentProgram) -> None:
        self.program = program
        self._app = app
        self._sandbox = ServiceSandbox(program.limits)
        self._verifier = WorkspaceVerifier(program.limits)
        self._folder = tempfile.TemporaryDirectory(prefix="verl_tool_gateway_")
        os.chmod(self._folder.name, 0o755)
        self._started = False
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the sandbox. Raises what it raises."""
        async with self._starting:
            if self._started:
                return
            engine = self.program.container.engine
            if self.program.image is None:
                await self._sandbox.start()
            elif shutil.which(engine) is None:
                raise ConfigError(f"gateway.program.container.engine={engine}: there is no such program on PATH")
            else:
                await find_provider(engine).remove_orphans()
            self._started = True

    async def run(
        self, session: SessionAddress, task: AgentTask, finish: Callable[[], Awaitable[FinishedSession]]
    ) -> Trajectory:
        """Run the program in `session`, then `finish` that one, also when cancelled, then the verifier of the task.
        Return the rollout, whose record says how the program ended."""
        with (
            WorkspaceCopy(self.program.max_copy_bytes)
            if task.verification is not None
            else contextlib.nullcontext() as copy
        ):
            result: ProgramResult | str
            containers: ProgramContainers | None = None
            try:
                place = self.program.choose_place(self._sandbox, task.image, task.limits)
                if isinstance(place, ProgramContainers):
                    containers = place
                    if task.verification is not None:
                        await place.check_verifier(task.verification)
                async with listen_for(
                    session.id, self._app, Path(self._folder.name), shared=containers is not None
                ) as path:
                    result = await run_program(
                        *(place, self.program, session, path, task.text, task.files, task.messages),
                        executable=task.executable,
                        copy=copy,
                        environment=task.environment,
                    )
            except (SandboxError, OSError) as error:
                result = str(error)
            finally:
                finished = await finish()
            rollout = finished.rollout
            # How a program ends that has called the model may be the model's doing, and is graded.
            if rollout.excluded is None and not finished.num_requests:
                rollout = with_fault(rollout, _why_no_request(result))
            # As in our own loop, nothing is judged after a fault, whoever caused it.
            is_judged = rollout.fault is None and rollout.excluded is not Excluded.ABORTED
            if copy is not None and is_judged:
                assert task.verification is not None
                verdict = await self._verifier.verify(copy, task.verification, containers)
                rollout = replace(rollout, verdict=verdict)
        if self.program.judges and is_judged:
            rollout = replace(rollout, verdict=_read_verdict(result))
        description: dict[str, Any] = {"error": result} if isinstance(result, str) else asdict(result)
        description.pop("verdict", None)
        description["settings"] = self.program.describe()
        return replace(rollout, extra={**rollout.extra, PROGRAM: description})

    async def close(self) -> None:
        """End the programs."""
        await self._sandbox.close()
        await self._verifier.close()
        self._folder.cleanup()


def _why_no_request(result: ProgramResult | str) -> str:
    if isinstance(result, str):
        return result
    return (
        f"the agent program {_how_it_ended(result)} without a request to the model; it printed: {result.output[-500:]}"
    )


def _how_it_ended(result: ProgramResult) -> str:
    return "was killed at its time limit" if result.exit_code is None else f"exited with {result.exit_code}"


def _read_verdict(result: ProgramResult | str) -> Verdict:
    """Return the verdict of a program that judges. One without a verdict has called the model, which may be why.

    An error of the sandbox or the container's engine is a fault. A policy cannot bring it about: it can end the program
    and what starts it, which is a result without a verdict, but not write what the forwarder reports.
    """
    if isinstance(result, str):
        fault = Fault(kind=FaultKind.SANDBOX, message=result, retryable=False)
        return Verdict(told=result, fault=fault, by_environment=True)
    try:
        if not result.verdict:
            raise ValueError(
                f"the program {_how_it_ended(result)} without a verdict; it printed: {result.output[-500:]}"
            )
        if words := _read_misconfiguration(result.verdict):
            fault = Fault(kind=FaultKind.MISCONFIGURED, message=words, retryable=False)
            return Verdict(told=words, fault=fault, seconds=result.seconds, by_environment=True)
        reward, numbers = reward_in(result.verdict.encode(), None)
    except ValueError as error:
        return Verdict(told=str(error), seconds=result.seconds, by_environment=True)
    return Verdict(reward, numbers=numbers, seconds=result.seconds, by_environment=True)


def _read_misconfiguration(text: str) -> str:
    """Return what a program that judges says is to be corrected, empty if it says nothing of the kind."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    words = found.get(MISCONFIGURED) if isinstance(found, dict) else None
    return words if isinstance(words, str) else ""
