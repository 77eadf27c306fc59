"""One bash on a pseudoterminal.

A command is typed as one line of the shell's, which bash reads to its end before it runs any of it: the command cannot
take it for its input. When the command has ended, the line prints a marker: a random word, the exit code, and the
directory. No variable, function, alias or usual trap of the command's gets to see the word before that: the marker is
printed by ``trap``, which no function can replace in POSIX mode, and the command's own traps are removed first. (One
that makes bash skip commands, or a program that reads the memory of its shell, can still find it: what that gains is an
exit code, which any command may choose.) After an interrupt, which takes the rest of the line away, the prompt says
so, and a line that prints a marker is typed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import time
from collections.abc import Callable

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends import ContainerProgram, Program, WorkspaceSandbox
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.worker import RunStatus
from verl_tool.servers.tools.workspace.pseudo_terminal import PseudoTerminal, TerminalClosedError

_BASH = ("bash", "--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i")
_VARIABLES = {
    **{"PS1": "", "PS2": "", "TERM": "dumb", "NO_COLOR": "1"},
    **{"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "PYTHONSTARTUP": ""},
}
_MARKERS_FD = 19
"""The terminal for markers, wherever the shell's output goes. There is no /dev/tty in the sandbox."""
_MARK = b"\x1e"
_FOLDER_CHARACTERS = 4096
"""Of the directory in a marker: a deeper one has no name by which it could be entered again."""
_MARKER = re.compile(rb"\x1e(?:([0-9a-f]{32}):(\d{0,3}):([^\x1e]{0,20000})|P)\x1e")
_STARTED_MARKER = re.compile(rb"\x1e(?:P|[0-9a-f]{0,32}(?::[^\x1e]{0,20000})?)\Z")
_INTERRUPTED = 128 + signal.SIGINT
AROUND_MARKER = re.compile(r"trap -- '' (?:SIG)?RTMAX\n|trap -- '\Z|\A' (?:SIG)?RTMAX\n")
"""What stays of the line that prints a marker when the marker is taken out."""
_QUOTED_AT_ONCE = 500
"""Bytes of a command in one line of those in which it is typed, each up to four characters; a terminal takes 4095."""
_ESCAPES = {byte: f"\\{byte:03o}" for byte in range(256) if not 32 <= byte < 127 or byte in b"'\\"}
_KILL_LINE = b"\x15"
_START_SECONDS = 20.0
_AFTER_SIGNAL_SECONDS = 1.0
_QUIET_SECONDS = 0.3
"""Programs that are sent keys have answered when they have been silent for so long."""


class Shell:
    """`start` it once, and `end` or `close` it. `run` and `type` one after the other; both may be cancelled."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        """`show`: is called with what its programs write, as it comes."""
        self._show = show
        self._process: Program | None = None
        self._begun = b""
        """Read, and maybe the beginning of a marker."""
        self._begin_word = self._word = b""
        self._typed = False
        """Whether keys were typed since the last command: it may wait for the rest of one."""
        self.idle = True
        self.begun = True
        """Whether the last command was begun: a shell may end before it reads one."""
        self._prompts = False
        """Whether the shell asks for a command, though the marker of the last one has not come."""
        self.exit_code: int | None = None
        """Of the last command; None if it has not ended, or by an interrupt."""
        self.folder: bytes = wire.WORK_DIRECTORY.encode()
        """Its directory after the last command."""
        self.terminal = PseudoTerminal(self._read)

    @property
    def alive(self) -> bool:
        """Whether it takes commands or keys."""
        return not self.terminal.closed

    async def start(self, session: WorkspaceSandbox, folder: bytes) -> None:
        """Start bash in a directory, or in the workspace's if there is no such any more. Raises TerminalClosedError if
        it does not answer, ToolFault if the session is lost."""
        ends = (self.terminal.theirs,) * 3
        try:
            self._process = await session.spawn(_BASH, streams=ends, env=_VARIABLES, cwd="/", terminal=True)
        finally:
            self.terminal.close_theirs()
        if isinstance(self._process, ContainerProgram):
            self.terminal.relayed = self._process
        await self.terminal.type(f"exec {_MARKERS_FD}>&2\n".encode(), time.monotonic() + _START_SECONDS)
        enter = b"\\builtin cd -- %b 2>/dev/null || \\builtin cd 2>/dev/null; :" % _quoted(folder)
        if not await self.run(enter, _START_SECONDS):
            raise TerminalClosedError

    async def run(self, command: bytes, seconds: float) -> bool:
        """Run a command without NUL; return whether it has ended within so many seconds, else `interrupt` it. Raises
        TerminalClosedError."""
        self.begun = self._prompts = False
        self.terminal.reset_modes()
        if self._typed:
            await self.terminal.signal(signal.SIGINT)
            await self._quiet_by(time.monotonic() + _AFTER_SIGNAL_SECONDS)
            self._typed = False
        deadline = time.monotonic() + seconds
        before, self.exit_code = self.exit_code, None
        self.idle = False
        await self.terminal.type(self._line(command, before or 0), deadline)
        return await self._is_terminated_by(deadline)

    async def interrupt(self) -> None:
        """End the command and bring the shell back. Raises TerminalClosedError if nothing does."""
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGINT):
            if await self.terminal.signal(number):
                deadline = time.monotonic() + _AFTER_SIGNAL_SECONDS
                await self._quiet_by(deadline)
                self._prompts = False
                await self.terminal.type(self._line(b":", 0), deadline)
                if await self._is_terminated_by(deadline):
                    self.exit_code = None
                    return
        raise TerminalClosedError

    def _line(self, command: bytes, exit_code: int) -> bytes:
        """What is typed to run a command, with new words; see `_line`."""
        self._begin_word, self._word = (secrets.token_hex(16).encode() for _ in range(2))
        return _line(command, self._begin_word, self._word, exit_code)

    async def type(self, keys: bytes, seconds: float) -> None:
        """Type keys; wait until the foreground program has answered, or time is up. Raises TerminalClosedError."""
        self._typed = True
        deadline = time.monotonic() + seconds
        await self.terminal.type(keys, deadline)
        await self._quiet_by(deadline)

    async def end(self) -> tuple[int | None, str]:
        """End it with all that it has started. Return its exit code if it has ended by itself, and in words why it is
        gone."""
        by_itself = not self.alive
        self.terminal.close()
        if self._process is None:
            return None, "the shell ended"
        if not by_itself:
            self._process.kill()
        try:
            end = await _end_of(self._process)
        except SandboxError:  # the sandbox's own end, of which the session tells when it is next used
            return None, "the shell ended"
        if end.limit_hit not in (None, wire.LIMIT_NAMES[wire.CANCELLED]):
            return None, f"the shell was ended by the limit {end.limit_hit}"
        if not by_itself:
            return None, "the shell no longer answered and was ended"
        return (os.WEXITSTATUS(end.status) if os.WIFEXITED(end.status) else None), "the shell ended"

    def close(self) -> None:
        """End it, and wait for nothing."""
        self.terminal.close()
        if self._process is not None:
            self._process.kill()

    async def _is_terminated_by(self, deadline: float) -> bool:
        interrupted = False
        while not self.idle:
            if self._prompts:
                # The shell, or a program of the command, had a SIGINT, which takes the rest of the line away.
                self._prompts, interrupted = False, True
                await self.terminal.type(self._line(b":", 0), deadline)
            if not await self._news_by(deadline):
                break
        if self.idle and interrupted:
            self.exit_code = _INTERRUPTED
        return self.idle

    async def _quiet_by(self, deadline: float) -> None:
        before = self.terminal.written
        while time.monotonic() < deadline:
            quiet = time.monotonic() + _QUIET_SECONDS if self.terminal.written > before else deadline
            if not await self._news_by(min(quiet, deadline)):
                return

    async def _news_by(self, deadline: float) -> bool:
        """Whether a program has written something by then. Raises TerminalClosedError if none will any more."""
        if not self.alive:
            raise TerminalClosedError
        self.terminal.news.clear()
        # Not `asyncio.wait_for`, which loses a cancellation that comes together with the news.
        news = asyncio.ensure_future(self.terminal.news.wait())
        try:
            return bool((await asyncio.wait({news}, timeout=max(0.0, deadline - time.monotonic())))[0])
        finally:
            news.cancel()

    def _read(self, data: bytes) -> None:
        """Take the markers out of what was read, and show the rest."""
        data, self._begun = self._begun + data, b""
        if _MARK not in data:
            self._show(data)
            return
        at = 0
        for marker in _MARKER.finditer(data):
            self._show(data[at : marker.start()])
            at = marker.end()
            if marker[1] is None:
                self._prompts = self.begun and not self.idle
            elif marker[1] == self._begin_word:
                self.begun = True
            elif marker[1] == self._word and marker[2] and not self.idle:
                self.idle, self.exit_code, self.folder = True, int(marker[2]), marker[3]
        started = _STARTED_MARKER.search(data, at)
        end = started.start() if started is not None else len(data)
        self._show(data[at:end])
        self._begun = data[end:]


def _line(command: bytes, begin_word: bytes, word: bytes, exit_code: int) -> bytes:
    """What is typed to run a command with the exit code of the one before it in ``$?``.

    An assignment, which nothing can replace, turns POSIX mode on, and unsetting it turns it off: in between, ``trap``
    is found before a function of that name. Quoted, it is no alias.
    """
    status = b"(\\builtin exit %d); " % exit_code if exit_code else b""
    marker = b"\036%b:${POSIXLY_CORRECT}:${PWD:0:%d}\036" % (word, _FOLDER_CHARACTERS)
    marker = marker.replace(b"\036", b"\"$'\\036'\"")
    lines = (
        b"POSIXLY_CORRECT=; \\unset -f builtin; \\unset POSIXLY_CORRECT; \\",
        b"\\builtin printf '\\036%b::\\036' >&%d; %b\\" % (begin_word, _MARKERS_FD, status),
        b"\\builtin eval %b; POSIXLY_CORRECT=$?; \\trap - DEBUG ERR RETURN; \\" % _quoted(command),
        b'\\trap -- "%b" RTMAX; \\trap -p RTMAX >&%d; \\trap - RTMAX; \\' % (marker, _MARKERS_FD),
        b"\\unset POSIXLY_CORRECT; PS1=$'\\036P\\036' PS2= PROMPT_COMMAND=\n",
    )
    return _KILL_LINE + b"\n".join(lines)


def _quoted(text: bytes) -> bytes:
    """A word of bash's, in printable characters and in lines that a terminal takes."""
    pieces = [text[at : at + _QUOTED_AT_ONCE] for at in range(0, len(text), _QUOTED_AT_ONCE)] or [b""]
    return "\\\n".join(f"$'{piece.decode('latin-1').translate(_ESCAPES)}'" for piece in pieces).encode("ascii")


async def _end_of(process: Program) -> RunStatus:
    """The end of a shell that has left its terminal, or was killed. Raises SandboxError."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(process.wait(), _AFTER_SIGNAL_SECONDS)
    process.kill()
    try:
        return await asyncio.wait_for(process.wait(), _START_SECONDS)
    except asyncio.TimeoutError:
        raise SandboxError("a shell could not be ended", retryable=False) from None
