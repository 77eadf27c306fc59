"""The edits of a workspace that can be taken back, and who makes them: nothing here holds up the event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import marshal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends import WorkspaceSandbox
from verl_tool.servers.tools.base import CallError, InvalidCall
from verl_tool.servers.tools.workspace import text_edits

MAX_STORED_BYTES = 2 << 20
"""Of earlier contents of a workspace's files, compressed; the oldest are let go first."""
INLINE_BYTES = 64 << 10
"""Of files and texts that are edited on the event loop, which takes a millisecond; more goes to a process."""


@dataclass(frozen=True)
class FileEdit:
    path: str
    before: bytes | None
    """The file's content before, packed; None if the edit made the file."""
    after: bytes
    """A digest of what the edit left."""


class Edits:
    """The edits of one workspace that can be taken back."""

    def __init__(self, session: WorkspaceSandbox) -> None:
        self._edits: deque[FileEdit] = deque()
        self._kept = 0

    def copy_for(self, session: WorkspaceSandbox) -> Edits:
        """Those of a fork, which may be taken back in it as well."""
        copy = Edits(session)
        copy._edits, copy._kept = self._edits.copy(), self._kept
        return copy

    async def close(self) -> None:
        """Nothing is held that must be given back."""

    def add(self, path: str, before: bytes | None, after: bytes) -> None:
        """Remember an edit; see `FileEdit`."""
        self._edits.append(FileEdit(path, before, after))
        self._kept += len(before or b"")
        while self._kept > MAX_STORED_BYTES:
            self._kept -= len(self._edits.popleft().before or b"")

    def last(self, path: str) -> FileEdit:
        """The last edit of a file; `forget` it when it is undone. Raises CallError if there is none."""
        edit = next((edit for edit in reversed(self._edits) if edit.path == path), None)
        if edit is None:
            raise CallError(f"there is no edit of {path} to undo")
        return edit

    def forget(self, edit: FileEdit) -> None:
        """It is undone."""
        self._edits.remove(edit)
        self._kept -= len(edit.before or b"")


class Editor:
    """Runs the functions of `text_edits`: on small files at once, on others in one process for all workspaces."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, name: str, *arguments: Any, seconds: float) -> Any:
        """What the function returns. Raises CallError if the edit cannot be made or took longer than so many seconds,
        InvalidCall if its arguments make no sense, and SandboxError if the process failed."""
        size = sum(len(argument) for argument in arguments if isinstance(argument, (str, bytes)))
        kind, outcome = (
            text_edits.answer(name, arguments) if size <= INLINE_BYTES else await self._ask(name, arguments, seconds)
        )
        if kind == "done":
            return outcome
        raise (InvalidCall if kind == text_edits.InvalidEdit.__name__ else CallError)(outcome)

    def close(self) -> None:
        """End the process; the next large file starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    async def _ask(self, name: str, arguments: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        loop = asyncio.get_running_loop()
        if self._turn is None or self._loop is not loop:
            self._turn, self._loop = asyncio.Lock(), loop
        try:
            async with self._turn_within(self._turn, seconds):
                return await self._answer(name, arguments, seconds)
        except asyncio.TimeoutError:
            return "EditError", f"the edit took more than {seconds:g} seconds and was stopped; the file is unchanged"

    @contextlib.asynccontextmanager
    async def _turn_within(self, turn: asyncio.Lock, seconds: float) -> Any:
        await asyncio.wait_for(turn.acquire(), seconds)
        try:
            yield
        finally:
            turn.release()

    async def _answer(self, name: str, arguments: tuple[Any, ...], seconds: float) -> tuple[str, Any]:
        """Raises TimeoutError, SandboxError."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        process = self._process
        exchange = asyncio.ensure_future(asyncio.to_thread(_exchange, process, name, arguments))
        try:
            await asyncio.wait({exchange}, timeout=seconds)
        finally:
            late = not exchange.done()
            if late:
                process.kill()
                await asyncio.wait({exchange})  # the thread has read the end
                exchange.exception()
                self.close()
        try:
            return exchange.result()
        except (OSError, EOFError, ValueError) as error:
            self.close()
            if late:
                raise asyncio.TimeoutError from None
            raise SandboxError(f"the process that edits files failed: {error!r}", retryable=True) from error


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (sys.executable, "-I", "-S", str(Path(text_edits.__file__))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
    )


def _exchange(process: subprocess.Popen[bytes], name: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """A question and its answer, in a thread, which waits without the interpreter."""
    source, target = process.stdout, process.stdin
    assert source is not None
    assert target is not None
    question = marshal.dumps((name, arguments))
    target.write(len(question).to_bytes(8, "little") + question)
    target.flush()
    header = source.read(8)
    body = source.read(int.from_bytes(header, "little")) if len(header) == 8 else b""
    if not body:
        raise EOFError("it ended")
    kind, outcome = marshal.loads(body)
    return kind, outcome


editor = Editor()
"""Of this process: there is one for all workspaces."""
atexit.register(editor.close)
