"""Ports that belong to one server of this machine, from before it binds them until it ends.

A port that is free now may be somebody else's when it is bound, and the replicas of a server share a port, as processes
of another server of the same user could too. So servers agree on ports first. A reservation is a UNIX socket in Linux's
abstract namespace (`unix(7)`): it is exclusive, seen by all users of the same network namespace, as ports are, and gone
with the process that holds it however that one ends. There is nothing stale to clear away. Programs that know nothing
of this may still bind any port; that shows when a server binds its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
from hashlib import blake2b
from pathlib import Path

from verl_tool.errors import VerlToolError
from verl_tool.http.listening_socket import BACKLOG, bind_at

_SINGLES = range(28_000, 32_768)
"""Ports that `free_ports` gives out: below those that Linux gives to outgoing connections (`ip_local_port_range`),
above those of Ray's workers."""
_ABSTRACT = Path("/proc/net/unix")
"""Lists the names of all such sockets."""
_CREDENTIALS = struct.Struct("iII")
"""Linux's ``struct ucred``: pid, uid, gid."""
_PARENT = re.compile(r"^PPid:\s+(\d+)$", re.MULTILINE)


class PortInUseError(VerlToolError):
    """The port is another server's."""


class Reservation:
    """What is this process's until `release`, or until it ends."""

    def __init__(self, *holders: socket.socket) -> None:
        self._holders = holders

    def release(self) -> None:
        """Give it back."""
        for holder in self._holders:
            holder.close()


_promised: dict[int, socket.socket] = {}
"""Ports that `free_ports` gave out, and what holds them for as long as this process lives."""


def reserve_port(port: int) -> Reservation:
    """One port that was chosen already, for a server in this process. Whether it can be bound is not looked at.

    Raises `PortInUseError` if it is another server's, or was promised by `free_ports` to somebody who is neither this
    process nor one that it descends from.
    """
    holder = _hold(f"server:{port}")
    if holder is None:
        raise PortInUseError(f"port {port} belongs to another tool server or eval endpoint; choose another with --port")
    promised_by = _holder_of(f"promise:{port}")
    if promised_by is not None and promised_by not in _own_line():
        holder.close()
        raise PortInUseError(f"port {port} is kept by process {promised_by} for a server of its own; choose another")
    return Reservation(holder)


def hold_port(host: str, port: int, reservation: Reservation | None = None) -> Reservation:
    """As `reserve_port`, for replicas in other processes of this user: they can listen at `port`, and nobody else can.
    `reservation`: the one of `reserve_port`, if there is one; it becomes part of this one.

    Raises `PortInUseError` too if somebody has the port.
    """
    reservation = reservation or reserve_port(port)
    try:
        holder = bind_at(host, port)
    except OSError as error:
        reservation.release()
        raise PortInUseError(
            f"port {port} on {host} cannot be used: {error.strerror}; choose another with --port"
        ) from error
    # Bound alone, it is shared from now on, and gets no connection, because it does not listen.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return Reservation(holder, *reservation._holders)


def share_port(port: int, server: str) -> Reservation:
    """In a replica of `server`: a share in its port. Raises `PortInUseError` if one of another server has a share."""
    # The name of a socket is limited, that of a server is not.
    mark = blake2b(server.encode(), digest_size=16).hexdigest()
    holder = _hold(f"share:{port}:{mark}:{os.getpid()}")
    pattern = re.compile(rf"@verl-tool-port:share:{port}:([^:]*):")
    if holder is None or set(pattern.findall(_ABSTRACT.read_text(encoding="utf-8", errors="replace"))) != {mark}:
        if holder is not None:
            holder.close()
        raise PortInUseError(f"port {port} is another server's on this node; choose another with --port")
    return Reservation(holder)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no other server gets as long as this process lives.

    This process and those that it starts may serve there. Raises OSError if there are not as many.
    """
    found: dict[int, socket.socket] = {}
    for port in random.SystemRandom().sample(_SINGLES, len(_SINGLES)):
        if len(found) == count:
            break
        holder = _hold(f"promise:{port}")
        if holder is None:
            continue
        if _holder_of(f"server:{port}") is None and _can_bind(port):
            found[port] = holder
        else:
            holder.close()
    if len(found) < count:
        raise OSError(f"{count} free ports are wanted and {len(found)} are left from {_SINGLES}")
    _promised.update(found)
    return list(found)


def _hold(name: str) -> socket.socket | None:
    """Take `name`; None if somebody has it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(_address(name))
        # Others connect to learn whose it is.
        holder.listen(BACKLOG)
    except OSError:
        holder.close()
        return None
    return holder


def _holder_of(name: str) -> int | None:
    """The process id of whoever has `name`: 0 if it cannot be told, None if nobody has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.setblocking(False)
        try:
            asker.connect(_address(name))
            credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except ConnectionRefusedError:
            return None
        except OSError:
            return 0
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    return int(pid)


def _address(name: str) -> str:
    return f"\0verl-tool-port:{name}"


def _can_bind(port: int) -> bool:
    """Whether nobody has `port`, on any address."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def _own_line() -> set[int]:
    """Process ids of this process and of those that it descends from."""
    line: set[int] = set()
    pid = os.getpid()
    while pid and pid not in line:
        line.add(pid)
        try:
            parent = _PARENT.search(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
        except OSError:
            break
        pid = int(parent[1]) if parent else 0
    return line
