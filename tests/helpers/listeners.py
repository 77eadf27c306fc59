"""Monitor the addresses on which a process and its descendants listen, as long as they live."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from types import TracebackType

import psutil

PAUSE_SECONDS = 0.1
STOP_SECONDS = 20.0
LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""The kernel's tables of sockets, and the states of those that accept connections: for UDP, those without a peer."""


class Listeners:
    """Monitors for the duration of the block. Reads the kernel's tables, which costs less than querying thirty
    processes of Ray: only the owner of a socket on an address other than loopback is looked up, once."""

    def __init__(self, pid: int) -> None:
        self._known = {pid: psutil.Process(pid)}
        self._looked_at: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="listeners", daemon=True)
        self.on_loopback = 0
        """Number of listeners of any process that appeared meanwhile. With none, the monitor saw nothing."""
        self.open_to_others: list[str] = []
        """Listeners of the process and its descendants on other interfaces than loopback."""

    def __enter__(self) -> Listeners:
        self._looked_at.update(inode for inode, _, _ in _listeners())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            new = [found for found in _listeners() if found[0] not in self._looked_at]
            self._looked_at.update(inode for inode, _, _ in new)
            others = {inode: where for inode, address, where in new if not _is_loopback(address)}
            self.on_loopback += len(new) - len(others)
            if others:
                owners = self._owners()
                self.open_to_others += [f"{where} of {owners[i]}" for i, where in others.items() if i in owners]

    def _owners(self) -> dict[str, str]:
        """Return command lines of our processes by the inodes of their sockets."""
        for process in list(self._known.values()):
            with suppress(psutil.Error):
                self._known.update((child.pid, child) for child in process.children(recursive=True))
        owners: dict[str, str] = {}
        for process in self._known.values():
            with suppress(OSError, psutil.Error):
                links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
                command = " ".join(process.cmdline())
                owners.update((link[8:-1], command) for link in links if link.startswith("socket:["))
        return owners


def _is_loopback(address: IPv4Address | IPv6Address) -> bool:
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _listeners() -> Iterator[tuple[str, IPv4Address | IPv6Address, str]]:
    """Return inode, address, and words that name both of each listener of this network namespace."""
    for table, state in LISTENING.items():
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for fields in map(str.split, lines):
            host, port = fields[1].split(":")
            if fields[3] == state:
                address = _address(host)
                yield fields[9], address, f"{table} {address} port {int(port, 16)}"


def _address(host: str) -> IPv4Address | IPv6Address:
    """Decode an address of the kernel's form: words of four bytes in the machine's order."""
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)
