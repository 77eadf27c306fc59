"""Ports are one server's, whoever else looks for some at the same moment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from verl_tool.http.listening_socket import bind_at, listen_at
from verl_tool.servers.serve import ports
from verl_tool.servers.serve.ports import (
    PortInUseError,
    free_ports,
    hold_port,
    reserve_port,
    share_port,
)

IMPORTS = "import sys, time; from verl_tool.servers.serve.ports import *;"
HOLD = "print(*given, flush=True); sys.stdin.read()"


@contextmanager
def process(code: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that took ports, and which."""
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{IMPORTS}{code};{HOLD}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        yield holder, [int(word) for word in holder.stdout.readline().split() if word.isdigit()]
    finally:
        holder.kill()
        holder.communicate()


def reserved_by_a_child(port: int) -> str:
    """What a child process of ours says that tries to serve at `port`."""
    code = f"{IMPORTS}\ntry: reserve_port({port})\nexcept PortInUseError as error: print(error)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_one_server_at_a_port():
    (port,) = free_ports(1)
    reservation = reserve_port(port)
    with pytest.raises(PortInUseError, match=f"port {port} belongs to another"):
        reserve_port(port)
    assert "belongs to another" in reserved_by_a_child(port)
    reservation.release()
    reserve_port(port).release()


def test_a_held_port_is_for_those_who_share_it_and_for_nobody_else():
    (port,) = free_ports(1)
    held = hold_port("127.0.0.1", port)
    with pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", port)
    for server in (bind_at("127.0.0.1", port, shared=True), bind_at("127.0.0.1", port, shared=True)):
        server.close()
    with pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    held.release()
    listen_at("127.0.0.1", port).close()


def test_a_port_at_which_somebody_listens_cannot_be_held():
    words = "cannot be used: Address already in use; choose another"
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as stranger,
        pytest.raises(PortInUseError, match=words),
    ):
        hold_port("127.0.0.1", stranger.getsockname()[1])


def test_replicas_share_a_port_with_those_of_their_own_server_only():
    (port,) = free_ports(1)
    with process(f"kept = share_port({port}, 'mine'); given = []") as (holder, _):
        share_port(port, "mine").release()
        with pytest.raises(PortInUseError, match=f"port {port} is another server's on this node"):
            share_port(port, "other")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        share_port(port, "other").release()


def test_a_long_name_of_a_server_is_no_conflict():
    (port,) = free_ports(1)
    mine = share_port(port, "m" * 200)
    with pytest.raises(PortInUseError, match="is another server's"):
        share_port(port, "m" * 201)
    mine.release()


def test_a_promised_port_is_for_its_process_and_those_below():
    with process("given = free_ports(1)") as (_, [port]), pytest.raises(PortInUseError, match="is kept by process"):
        reserve_port(port)
    (own,) = free_ports(1)
    assert reserved_by_a_child(own) == ""


def test_no_port_is_promised_twice(monkeypatch):
    with process("given = free_ports(3)") as (_, taken):
        monkeypatch.setattr(ports, "_SINGLES", range(min(taken), min(taken) + 1))
        with pytest.raises(OSError, match="1 free ports are wanted and 0 are left"):
            free_ports(1)


def test_a_port_at_which_a_server_starts_is_not_promised(monkeypatch):
    with process("given = free_ports(1); kept = reserve_port(given[0]); import verl_tool.servers.serve.ports as p;"
                 "p._promised.pop(given[0]).close()") as (_, [port]):  # fmt: skip
        monkeypatch.setattr(ports, "_SINGLES", range(port, port + 1))
        with pytest.raises(OSError, match="0 are left"):
            free_ports(1)


def test_free_ports_differ_and_no_connection_is_given_them():
    found = set(free_ports(20))
    assert len(found) == 20
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(found) < max(lowest_given, 32_768)


def test_a_port_that_is_listened_on_is_not_free(monkeypatch):
    with socket.socket() as listener:
        for port in range(28_000, 32_768):
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                break
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "_SINGLES", range(taken, taken + 1))
        with pytest.raises(OSError, match="1 free ports are wanted and 0 are left"):
            free_ports(1)
