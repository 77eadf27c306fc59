"""The process that imports an environments' package once and forks a process for each episode.

Messages on its channel, a SOCK_SEQPACKET socket, are JSON. The first is its configuration; the answer is
``{"ready": true}``, or ``{"error": words}``. Then it takes ``{"fork": id}`` with the episode's socket attached, and
``{"end": id}``, which gives the episode's process two seconds to end. It reports ``{"exited": id, "status": status}``
with the status of `os.waitpid`. When the channel is closed it kills all processes and ends; when it is killed itself,
the kernel kills the processes of the episodes. Runs in the foreign interpreter with the standard library only.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import time
import traceback

from .episode_process import describe_error, serve_episode
from .kinds import load_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .kinds import Maker

MAX_MESSAGE_BYTES = 1 << 16
END_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


def main(channel_fd: int) -> None:
    """Serve until the channel is closed."""
    die_with_parent()
    channel = socket.socket(fileno=channel_fd)
    config = json.loads(channel.recv(MAX_MESSAGE_BYTES))
    try:
        makers = {name: load_kind(name, config["opponent"]) for name in config["environments"]}
    except Exception as error:  # noqa: BLE001  (a package may raise anything while it is imported)
        traceback.print_exc()
        channel.send(json.dumps({"error": describe_error(error)}).encode())
        return
    discard_output()
    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"ready": True}).encode())
    ForkServer(channel, makers, config["memory_bytes"]).run()


class ForkServer:
    """The processes of episodes, by the ids that the other side gave them."""

    def __init__(self, channel: socket.socket, makers: dict[str, Maker], memory_bytes: int) -> None:
        self._channel, self._makers, self._memory_bytes = channel, makers, memory_bytes
        self._pids: dict[int, int] = {}
        self._deadlines: dict[int, float] = {}
        """When to kill an episode's process that is to end."""
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)

    def run(self) -> None:
        """Serve until the channel is closed, and kill what is left."""
        try:
            while self._serve_once():
                pass
        finally:
            for pid in self._pids.values():
                kill_group(pid)

    def _serve_once(self) -> bool:
        channel = self._channel.fileno()
        ready, _, _ = select.select([channel, self._wake], [], [], self._seconds_left())
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        self._reap()
        self._kill_late()
        return self._take_message() if channel in ready else True

    def _take_message(self) -> bool:
        """Return False if the channel is closed."""
        size = array.array("i").itemsize
        data, attached, _, _ = self._channel.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(size))
        if not data:
            return False
        message: dict[str, Any] = json.loads(data)
        if "fork" in message:
            [fd] = [fd for _, _, content in attached for fd in array.array("i", content[:size])]
            self._fork(message["fork"], fd)
        else:
            self._deadlines[message["end"]] = time.monotonic() + (END_SECONDS if message["gently"] else 0.0)
            self._kill_late()
        return True

    def _fork(self, episode: int, fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._become_episode(parent)
                with socket.socket(fileno=fd) as connection:
                    serve_episode(connection, self._makers, self._memory_bytes)
                status = 0
            finally:
                os._exit(status)
        os.close(fd)
        self._pids[episode] = pid

    def _become_episode(self, parent: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wake)
        os.close(self._woken)
        self._channel.close()
        os.setsid()
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)

    def _reap(self) -> None:
        """Report the processes that have exited, and kill what they started."""
        for episode, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # before the pid is free for another process
            _, status = os.waitpid(pid, 0)
            del self._pids[episode]
            self._deadlines.pop(episode, None)
            self._channel.send(json.dumps({"exited": episode, "status": status}).encode())

    def _kill_late(self) -> None:
        now = time.monotonic()
        for episode, deadline in list(self._deadlines.items()):
            if now >= deadline:
                del self._deadlines[episode]
                if episode in self._pids:
                    kill_group(self._pids[episode])

    def _seconds_left(self) -> float | None:
        return max(0.0, min(self._deadlines.values()) - time.monotonic()) if self._deadlines else None


def kill_group(pid: int) -> None:
    """Kill a process of ours that was not reaped, and its process group."""
    for kill in (os.kill, os.killpg):  # it may have no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Be killed when the process that started this one has exited."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def discard_output() -> None:
    """Write nothing any more to standard output and error: what a game prints may be without bound."""
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
