"""Going on from a turn in the page: runs the command ``python -m verl_tool.replay.branch`` and tells what it says."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verl_tool.http.event_stream import event
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse, error_response, headers_of
from verl_tool.http.request_body import RequestBodies
from verl_tool.util.parent_death import signalled_with_parent
from verl_tool.viewer.endpoint_proxy import UNREAD_SECONDS, TimedStream, read_order, reject_other_pages
from verl_tool.viewer.run_watch import RunWatch, UnknownRunError

MAX_BODY_BYTES = 1 << 20
COMMAND_SECONDS = 1800.0
STOP_SECONDS = 15.0
"""One that was interrupted has this long to free its sessions before it is killed."""
COLUMNS = "100"
"""Width of the tables that it prints."""


class BranchOrder(msgspec.Struct, forbid_unknown_fields=True):
    """What a page asks for. `turn` counts from 1; None: the values of all turns."""

    run: str
    file: str
    """As the table names it."""
    line: Annotated[int, msgspec.Meta(ge=0)]
    """In the file, from 0."""
    turn: Annotated[int, msgspec.Meta(ge=1)] | None = None
    action: str | None = None
    observation: str | None = None
    samples: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    def arguments(self) -> list[str]:
        """Of the command, but for the place."""
        edits = {"turn": self.turn, "action": self.action, "observation": self.observation, "samples": self.samples}
        flags = [f"--{name}={value}" for name, value in edits.items() if value is not None]
        return flags if self.turn is not None else [*flags, "--values"]


class BranchJobs:
    """Runs one command at a time, for the runs that `watch` knows.

    `options`: further ones of the command; None: pages may not go on from turns.
    """

    def __init__(self, watch: RunWatch, options: Sequence[str] | None = None) -> None:
        self._watch, self._options = watch, options
        self._bodies = RequestBodies(MAX_BODY_BYTES)
        self._runs = False

    def routes(self) -> list[Route]:
        return [Route("/api/branching", self._enabled), Route("/api/branch", self._branch, methods=["POST"])]

    async def _enabled(self, request: Request) -> Response:
        return JsonResponse({"enabled": self._options is not None})

    async def _branch(self, request: Request) -> Response:
        """What the command prints, as events ``{"text": …}``, and at its end ``{"exit": code}``."""
        try:
            reject_other_pages(headers_of(request.scope))
            if self._options is None:
                raise HttpError(404, "no_branching", "this viewer goes on from no turn; start it with --branch")
            order = await read_order(request, self._bodies, BranchOrder, "asks for no branch")
            command = await run_in_threadpool(self._command, order, self._options)
            self._reject_more()
        except HttpError as error:
            return error_response(error)
        return TimedStream(self._events(command), COMMAND_SECONDS + UNREAD_SECONDS)

    def _command(self, order: BranchOrder, options: Sequence[str]) -> list[str]:
        """Raises HttpError if there is no such trajectory."""
        try:
            run = self._watch.run(order.run)
        except UnknownRunError as error:
            raise HttpError(404, "unknown_run", str(error)) from None
        known = next((file for file in run.record_files() if file.name == order.file), None)
        if known is None or run.file is not None:
            raise HttpError(404, "unknown_trajectory", f"the run has no file of trajectories {order.file[:80]!r}")
        branched = known.path.parent.name == "branches"
        place = f"{'branches/' if branched else ''}{known.path.name}:{order.line + 1}"
        return [
            *(sys.executable, "-m", "verl_tool.replay.branch", *options, *order.arguments()),
            *("--", str(run.folder), place),
        ]

    async def _events(self, command: list[str]) -> AsyncGenerator[bytes, None]:
        """Closed before its end, it interrupts the command."""
        self._reject_more()
        self._runs = True
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
                preexec_fn=signalled_with_parent(signal.SIGINT),
                env={**os.environ, "COLUMNS": COLUMNS},
            )
            try:
                async for text in _printed(process):
                    yield event({"text": text})
                yield event({"exit": await process.wait()})
            finally:
                await _stopped(process)
        finally:
            self._runs = False

    def _reject_more(self) -> None:
        if self._runs:
            words = "the viewer goes on from another turn already; stop that, or wait for it"
            raise HttpError(503, "overloaded", words, headers=RETRY_AFTER)


async def _printed(process: Process) -> AsyncGenerator[str, None]:
    """All that it prints, as it comes. Raises HttpError at its deadline."""
    assert process.stdout is not None
    decoder, deadline = codecs.getincrementaldecoder("utf-8")("replace"), COMMAND_SECONDS
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            part = await asyncio.wait_for(process.stdout.read(1 << 14), max(0.0, began + deadline - loop.time()))
        except asyncio.TimeoutError:
            words = f"the command was not done within {deadline:g} s; it was stopped"
            raise HttpError(504, "timeout", words) from None
        if text := decoder.decode(part, final=not part):
            yield text
        if not part:
            return


async def _stopped(process: Process) -> None:
    """End it and what it has started: it frees its sessions first, if it has not come to its end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
