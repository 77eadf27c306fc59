"""The terminal of a workspace: a shell that stays from call to call, and what it shows during each.

A shell that ends or does not come back is replaced by another one in the same directory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.backends import WorkspaceSandbox
from verl_tool.sandbox.backends.protocol import unusable
from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.workspace.pseudo_terminal import TerminalClosedError
from verl_tool.servers.tools.workspace.screen import HeadAndTail
from verl_tool.servers.tools.workspace.shell import AROUND_MARKER, Shell

_BETWEEN_CALLS_BYTES = 1 << 16
"""Kept of what background jobs write between calls."""
_OWN_TRACE = re.compile(
    r"^\++ (?:PS1=|PS2=|PROMPT_COMMAND=|POSIXLY_CORRECT=|trap - (?:DEBUG ERR RETURN|RTMAX)$|trap -p RTMAX$"
    r"|unset -f builtin$|unset POSIXLY_CORRECT$|.*(?:\\036)?[0-9a-f]{32}:).*\n?",
    re.MULTILINE,
)
"""What ``set -x`` shows of the line that is typed around a command."""


@dataclass(frozen=True)
class TerminalOutput:
    """What a terminal showed during one call."""

    text: str
    exit_code: int | None = None
    """Of a command; None if it was interrupted, or keys were sent."""
    interrupted: bool = False
    lost: str = ""
    """Why the shell was another one than in the call before; empty if it was the same."""
    ended: str = ""
    """Why the shell has ended in this call, so that there is another one now; empty if it has not."""
    running: bool = False
    """A program is in the foreground and takes keys."""


class Terminal:
    """Its shell is started at the first call."""

    def __init__(self, session: WorkspaceSandbox) -> None:
        self._session = session
        self._shell: Shell | None = None
        self._folder = session.work_directory.encode()
        self._shown = HeadAndTail(_BETWEEN_CALLS_BYTES)

    def copy_for(self, session: WorkspaceSandbox) -> Terminal:
        """That of a fork. Raises ToolFault ``not_forkable`` if there is a shell."""
        if self._shell is not None:
            words = (
                "a shell with its variables and jobs cannot be copied; serve bash_terminal with the option stateless"
            )
            raise ToolFault(FaultKind.NOT_FORKABLE, words, retryable=False)
        return Terminal(session)

    async def close(self) -> None:
        self._drop()

    async def run(self, command: str, seconds: float, output_bytes: int) -> TerminalOutput:
        """Run a command in the shell, and interrupt it when its time is up. Raises CallError if a program is in the
        foreground or the command cannot be given to a shell, ToolFault if the session is lost, and SandboxError if a
        shell could not be started."""
        typed = command.encode("utf-8", "surrogatepass")
        if b"\0" in typed:
            raise CallError("the command holds a NUL character, which no shell can take")
        async with self._call(output_bytes) as (shell, lost):
            if await shell.terminal.runs_a_program():
                raise CallError('a program runs in the foreground; send it keys, such as "C-c" to interrupt it, first')
            interrupted = False
            try:
                interrupted = not await shell.run(typed, seconds)
                if interrupted:
                    await shell.interrupt()
                elif not shell.begun:  # something of an earlier command's stands in its way
                    raise TerminalClosedError
            except TerminalClosedError:
                if not shell.begun and not interrupted:  # it had ended before, or could not run it
                    return await self._run_in_another(typed, seconds)
                return await self._replaced(lost, interrupted)
            self._folder = shell.folder
            return TerminalOutput(self._text(), shell.exit_code, interrupted, lost)

    async def _run_in_another(self, command: bytes, seconds: float) -> TerminalOutput:
        """Run a command that no shell has begun in a new one. Raises as `_start`; CallError if that begins none."""
        before = await self._replaced("", False)
        shell = self._shell
        assert shell is not None
        interrupted = False
        try:
            interrupted = not await shell.run(command, seconds)
            if interrupted:
                await shell.interrupt()
        except TerminalClosedError:
            if shell.begun:
                return await self._replaced(before.ended, interrupted)
            raise CallError(
                "the shell ended before the command began, and so did another one; nothing was run"
            ) from None
        self._folder = shell.folder
        return TerminalOutput(self._text(), shell.exit_code, interrupted, before.ended)

    async def type(self, keys: bytes, seconds: float, output_bytes: int) -> TerminalOutput:
        """Type keys, and see what the program in the foreground makes of them, for so many seconds at most. Raises
        ToolFault if the session is lost, SandboxError if a shell could not be started."""
        async with self._call(output_bytes) as (shell, lost):
            try:
                await shell.type(keys, seconds)
            except TerminalClosedError:
                return await self._replaced(lost, False)
            drawn = "\n".join(line.rstrip() for line in self._text().split("\n"))
            return TerminalOutput(drawn, running=await shell.terminal.runs_a_program(), lost=lost)

    @contextlib.asynccontextmanager
    async def _call(self, output_bytes: int) -> AsyncIterator[tuple[Shell, str]]:
        """The shell, ready for a command or keys, and why it is another one than before, if it is."""
        before, self._shown = self._shown, HeadAndTail(output_bytes)
        self._shown.take_over(before)
        self._session.touch()
        if self._shell is not None:
            self._shell.terminal.watch(True)
        try:
            lost = await self._close_if_exited()
            yield self._shell or await self._start(), lost
        finally:
            if self._shell is not None:
                self._shell.terminal.watch(False)
            self._session.touch()

    async def _close_if_exited(self) -> str:
        """End a shell that takes nothing any more. Returns why; empty if it is well, or there is none."""
        shell = self._shell
        if shell is None:
            return ""
        try:
            if not shell.alive:
                raise TerminalClosedError
            if not shell.idle:  # a call was cancelled
                await shell.interrupt()
        except TerminalClosedError:
            self._shell = None
            return (await shell.end())[1]
        return ""

    async def _start(self) -> Shell:
        """Raises ToolFault if the session is lost, SandboxError if the shell does not answer."""
        shell = self._shell = Shell(lambda data: self._shown.write(data))
        pristine = self._session.pristine
        try:
            await shell.start(self._session, self._folder)
        except BaseException as error:
            self._drop()
            if isinstance(error, TerminalClosedError):
                await self._session.exec(["true"])  # raises if it is the session that is gone
                words = f"a shell could not be started: {self._text()!r:.300}"
                raise unusable(words, pristine, retryable=True) from None
            raise
        return shell

    async def _replaced(self, lost: str, interrupted: bool) -> TerminalOutput:
        """What was shown by a shell that is gone; there is another one in its place then. Raises as `_start`."""
        if self._shell is None:
            raise ToolFault(FaultKind.STATE_LOST, "the workspace was closed", retryable=False)
        shell, self._shell = self._shell, None
        text, (code, why) = self._text(), await shell.end()
        self._folder = shell.folder
        await self._start()
        return TerminalOutput(text, code, interrupted, lost, why)

    def _drop(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.close()

    def _text(self) -> str:
        shown, self._shown = self._shown, HeadAndTail(_BETWEEN_CALLS_BYTES)
        return _OWN_TRACE.sub("", AROUND_MARKER.sub("", shown.text()))
