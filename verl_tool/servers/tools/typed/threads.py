"""Functions that block, run in threads of their own so that the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind

MAX_THREADS = 64
"""Calls of one tool that run in threads at once; further ones wait for their turn, until their deadline."""

IDLE_SECONDS = 10.0
"""How long a thread waits for a further call before it ends."""

_Outcome = tuple[object, BaseException | None]
_Calls = SimpleQueue[Callable[[], None]]


class Threads:
    """A bounded number of daemon threads, each with one call at a time.

    A call cannot be stopped: one whose caller has left goes on, and keeps its place until it ends by itself.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._places = asyncio.Semaphore(MAX_THREADS)
        self._abandoned = 0
        """Threads that run on though nobody waits for them."""
        self._idle: list[_Calls] = []
        """Of threads that wait for a call, the latest last."""

    def check(self) -> None:
        """Raise ToolFault if every place is taken by a call that nobody waits for: it may never come back."""
        if self._abandoned >= MAX_THREADS:
            message = (
                f"all {MAX_THREADS} threads of tool {self._owner} run calls that outlasted their deadline; let the "
                "function end by itself (a timeout of its own), or make it async"
            )
            raise ToolFault(FaultKind.OVERLOADED, message, retryable=True)

    async def begin(self, function: Callable[[], object]) -> asyncio.Future[_Outcome]:
        """Call it in a thread as soon as there is a place. The future tells what came of it, and is never cancelled."""
        self.check()
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[_Outcome] = loop.create_future()
        context = contextvars.copy_context()
        calls = self._thread()

        def work() -> None:
            outcome = context.run(_outcome_of, function)
            self._idle.append(calls)
            # The loop may be closed by now: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finished.set_result, outcome)

        finished.add_done_callback(lambda _: self._places.release())
        calls.put(work)
        return finished

    def _thread(self) -> _Calls:
        """One that is idle, or a new one. Raises ToolFault, and gives the place back."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        calls: _Calls = SimpleQueue()
        try:
            threading.Thread(target=self._work, args=(calls,), name=f"tool-{self._owner}", daemon=True).start()
        except RuntimeError as error:
            self._places.release()
            message = f"tool {self._owner}: no thread can be started ({error}); raise the limit of processes"
            raise ToolFault(FaultKind.OVERLOADED, message, retryable=True) from error
        return calls

    def _work(self, calls: _Calls) -> None:
        """What a thread does, until it has been idle for long."""
        while True:
            with contextlib.suppress(Empty):
                calls.get(timeout=IDLE_SECONDS)()
                continue
            try:
                self._idle.remove(calls)
            except ValueError:
                continue  # it was given a call just now
            return

    async def outcome(self, ended: asyncio.Future[_Outcome]) -> object:
        """What the function returned; raises what it raised."""
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            if not ended.done():
                self._abandoned += 1
                ended.add_done_callback(self._came_back)
            raise
        value, error = ended.result()
        if error is not None:
            raise error
        return value

    def _came_back(self, _: asyncio.Future[_Outcome]) -> None:
        self._abandoned -= 1


def _outcome_of(function: Callable[[], object]) -> _Outcome:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        return None, error
