"""Our end of a pseudoterminal (pty(7)): typing, what programs write, and signals to the one in the foreground."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import termios
import time
from collections.abc import Callable

from verl_tool.sandbox.backends import ContainerProgram

_ROWS, _COLUMNS = 50, 200
_TIOCGSID, _TIOCSIG = 0x5429, 0x40045436
_READS_AT_ONCE = 16
"""Each of up to 4095 bytes."""
_FLOOD_BYTES = 8 << 20
"""Since it is watched; what comes after them is read at intervals, so that the event loop has time for others."""
_FLOOD_SECONDS = 0.002
_UNWATCHED_SECONDS = 0.25


class TerminalClosedError(Exception):
    """No program has the terminal open any more, or none takes what is typed."""


class PseudoTerminal:
    """One pseudoterminal without echo. Bound to the event loop in which it is made; `close` it."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        """`show`: is called with what programs write, as it comes."""
        self._show = show
        self._ours, self.theirs = pty.openpty()
        """`theirs`: the programs' end, to be let go of by `close_theirs`."""
        _set_modes(self.theirs)
        self._modes = termios.tcgetattr(self.theirs)
        os.set_blocking(self._ours, False)
        self.news = asyncio.Event()
        """Set when something was written, or the terminal was closed."""
        self.closed = False
        """Whether no program has it open any more."""
        self.written = 0
        """Bytes that programs have written since it is watched."""
        self.relayed: ContainerProgram | None = None
        """What passes it on to a terminal in a container, if something does: there are the programs."""
        self._watched = True
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close_theirs(self) -> None:
        """Once a program has been started with it."""
        os.close(self.theirs)

    def close(self) -> None:
        """Hang up. Programs that still have it open get SIGHUP."""
        self.closed = True
        self._stop_listening()
        os.close(self._ours)
        self.news.set()

    def watch(self, watched: bool) -> None:
        """Whether somebody waits for what programs write: else it is read slowly, and no program waits for ever."""
        self._watched, self.written = watched, 0
        if not self.closed:
            self._stop_listening()
            self._listen()

    async def type(self, keys: bytes, deadline: float) -> None:
        """Type. Raises TerminalClosedError if nobody has taken all of it by then."""
        left = memoryview(keys)
        while left:
            if self.closed:
                raise TerminalClosedError
            try:
                left = left[os.write(self._ours, left) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TerminalClosedError from None
                await asyncio.sleep(0.002)
            except OSError:
                raise TerminalClosedError from None

    def reset_modes(self) -> None:
        """Undo what programs have set; not in a container. Raises TerminalClosedError."""
        if self.closed:
            raise TerminalClosedError
        if self.relayed is not None:
            return
        try:
            termios.tcsetattr(self._ours, termios.TCSANOW, self._modes)
        except (OSError, termios.error):
            raise TerminalClosedError from None

    async def runs_a_program(self) -> bool:
        """Whether another program than the one that was started with the terminal is in the foreground."""
        if not self.closed and self.relayed is not None:
            leader, group = await self.relayed.foreground()
            return group != leader
        return not self.closed and self._foreground() not in (0, self._leader())

    async def signal(self, number: signal.Signals) -> bool:
        """Send SIGINT or SIGQUIT to what is in the foreground, SIGKILL to a program that another one has started there.
        Return whether it was sent."""
        if self.closed:  # the descriptor may be another's
            return False
        if self.relayed is not None:
            return await self.relayed.foreground(number) != (0, 0)
        group, leader = self._foreground(), self._leader()
        try:
            if number is not signal.SIGKILL:
                fcntl.ioctl(self._ours, _TIOCSIG, number)
                return True
            # The number may be another's once the group is gone: as long as its leader lives, it is not.
            if group in (0, leader) or os.getsid(group) != leader:
                return False
            os.killpg(group, number)
        except OSError:
            return False
        return True

    def _foreground(self) -> int:
        """Its foreground process group; 0 if there is none."""
        try:
            return max(0, os.tcgetpgrp(self._ours))
        except OSError:
            return 0

    def _leader(self) -> int:
        """The process that it controls; 0 if that has ended."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self._ours, _TIOCGSID, bytes(4)))[0])
        except OSError:
            return 0

    def _listen(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _stop_listening(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        asyncio.get_running_loop().remove_reader(self._ours)

    def _read(self) -> None:
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self._ours, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self.written += len(data)
            self._show(data)
        self.news.set()
        pause = _UNWATCHED_SECONDS if not self._watched else _FLOOD_SECONDS if self.written > _FLOOD_BYTES else 0.0
        if self.closed or pause:
            self._stop_listening()
        if pause and not self.closed:
            self._pause = asyncio.get_running_loop().call_later(pause, self._listen)


def _set_modes(terminal: int) -> None:
    """No echo, and line feeds as they are: nothing is shown that no program wrote."""
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL | termios.ECHOCTL)
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
