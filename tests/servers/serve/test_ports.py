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

from verl_tool.servers.serve import ports
from verl_tool.servers.serve.ports import (
    BLOCK_SIZE,
    PortTakenError,
    Reservation,
    free_ports,
    reserve_block,
    reserve_port,
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
        yield holder, [int(word) for word in holder.stdout.readline().split()]
    finally:
        holder.kill()
        holder.communicate()


@contextmanager
def released(reservation: Reservation) -> Iterator[range]:
    try:
        yield reservation.ports
    finally:
        reservation.release()


def reserved_by_a_child(port: int) -> str:
    """What a child process of ours says that tries to serve at `port`."""
    code = f"{IMPORTS}\ntry: reserve_port({port})\nexcept PortTakenError as error: print(error)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_three_processes_at_once_get_three_blocks():
    code = "block = reserve_block(); given = [block.ports.start, block.ports.stop]"
    with process(code) as (_, one), process(code) as (_, two), process(code) as (_, three):
        taken = [set(range(*bounds)) for bounds in (one, two, three)]
        assert [len(ports) for ports in taken] == [BLOCK_SIZE] * 3
        assert len(set.union(*taken)) == 3 * BLOCK_SIZE


def test_a_block_is_free_again_when_its_process_is_killed(monkeypatch):
    code = "block = reserve_block(); given = [block.ports.start]"
    with process(code) as (holder, [first]):
        monkeypatch.setattr(ports, "_BLOCKS", range(first, first + 1))
        with pytest.raises(PortTakenError, match="no 128 neighbouring ports are left"):
            reserve_block()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with released(reserve_block()) as block:
            assert block.start == first


def test_a_block_in_which_a_stranger_listens_is_left_alone(monkeypatch):
    with released(reserve_block()) as block:
        pass
    monkeypatch.setattr(ports, "_BLOCKS", range(block.start, block.start + 1))
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", block[17]))
        stranger.listen()
        with pytest.raises(PortTakenError):
            reserve_block()
    reserve_block().release()


def test_one_server_at_a_port():
    (port,) = free_ports(1)
    with released(reserve_port(port)):
        with pytest.raises(PortTakenError, match=f"port {port} belongs to another"):
            reserve_port(port)
        assert "belongs to another" in reserved_by_a_child(port)
    with released(reserve_port(port)):
        pass


def test_a_promised_port_is_for_its_process_and_those_below():
    with process("given = free_ports(1)") as (_, [port]), pytest.raises(PortTakenError, match="is kept by process"):
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
