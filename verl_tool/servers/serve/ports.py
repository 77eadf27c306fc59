"""Ports that belong to one server of this machine, from before it binds them until it ends.

A port that is free now may be somebody else's when it is bound, and Ray Serve opens some of its ports so that several
listeners may share them. So servers agree on ports first. A reservation is a UNIX socket in Linux's abstract namespace
(`unix(7)`): it is exclusive, seen by all users of the same network namespace, as ports are, and gone with the process
that holds it however that one ends. There is nothing stale to clear away. Programs that know nothing of this may still
bind any port; that shows when a server binds its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
from pathlib import Path

from verl_tool.errors import VerlToolError

BLOCK_SIZE = 128
_BLOCKS = range(20_000, 28_000, BLOCK_SIZE)
"""First ports of the blocks. Below the ports that Linux gives to outgoing connections (`ip_local_port_range`), above
those of Ray's workers."""
_SINGLES = range(28_000, 32_768)
"""Ports that are reserved one by one, in the same bounds."""
_BACKLOG = 4096
_CREDENTIALS = struct.Struct("iII")
"""Linux's ``struct ucred``: pid, uid, gid."""
_PARENT = re.compile(r"^PPid:\s+(\d+)$", re.MULTILINE)


class PortTakenError(VerlToolError):
    """The port is another server's."""


class Reservation:
    """Ports that are this process's until `release`, or until it ends."""

    def __init__(self, ports: range, holder: socket.socket) -> None:
        self.ports = ports
        self._holder = holder

    def release(self) -> None:
        """Give them back."""
        self._holder.close()


_promised: dict[int, socket.socket] = {}
"""Ports that `free_ports` gave out, and what holds them for as long as this process lives."""


def reserve_block() -> Reservation:
    """`BLOCK_SIZE` neighbouring ports, none of which anybody listens on at this moment. Raises `PortTakenError`."""
    for first in random.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        holder = _hold(f"block:{first}")
        if holder is None:
            continue
        ports = range(first, first + BLOCK_SIZE)
        if all(map(_can_bind, ports)):
            return Reservation(ports, holder)
        holder.close()
    raise PortTakenError(f"no {BLOCK_SIZE} neighbouring ports are left from {_BLOCKS.start} to {_BLOCKS.stop - 1}")


def reserve_port(port: int) -> Reservation:
    """One port that was chosen already, for a server in this process. Whether it can be bound is not looked at.

    Raises `PortTakenError` if it is another server's, or was promised by `free_ports` to somebody who is neither this
    process nor one that it descends from.
    """
    holder = _hold(f"server:{port}")
    if holder is None:
        raise PortTakenError(f"port {port} belongs to another tool server or eval endpoint; choose another with --port")
    promised_by = _holder_of(f"promise:{port}")
    if promised_by is not None and promised_by not in _own_line():
        holder.close()
        raise PortTakenError(f"port {port} is kept by process {promised_by} for a server of its own; choose another")
    return Reservation(range(port, port + 1), holder)


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
        holder.listen(_BACKLOG)
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
