"""The port that replicas share, from its claim until it is left, and a replica that does not come to serve."""

from __future__ import annotations

import asyncio
import socket

import pytest

from verl_tool.errors import StartError
from verl_tool.http.listening_socket import bind_at
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.cluster.members import Member, Members
from verl_tool.servers.serve import deployment, replica
from verl_tool.servers.serve.deployment import ToolReplica
from verl_tool.servers.serve.ports import free_ports, share_port
from verl_tool.servers.serve.replica import SharedPort


async def app(scope, receive, send):
    raise AssertionError("nobody asks")


async def test_a_port_of_another_server_is_refused_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "CLAIM_SECONDS", 0.0)
    (port,) = free_ports(1)
    other = share_port(port, "other")
    with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port} cannot be used: .*another server's"):
        await SharedPort("127.0.0.1", port, "mine").claim()
    other.release()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StartError, match=r"in use.*choose another"):
        await SharedPort("127.0.0.1", port, "mine").claim()
    share_port(port, "other").release()  # what was not had is given back


async def test_a_port_is_waited_for_that_a_replaced_server_still_has() -> None:
    (port,) = free_ports(1)
    other, mine = share_port(port, "other"), SharedPort("127.0.0.1", port, "mine")
    asyncio.get_running_loop().call_later(0.3, other.release)
    await mine.claim()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    await mine.open(app)
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        assert mine.is_open()
    finally:
        await mine.close(1.0)
    assert not mine.is_open()


async def test_a_server_that_is_stopped_before_it_has_started_serves_nothing() -> None:
    listener = bind_at("127.0.0.1", 0)
    server = DirectServer(listener)
    opening = asyncio.create_task(server.open(app))
    await asyncio.sleep(0)
    opening.cancel()
    await server.stop_accepting()
    await server.close(1.0)
    assert not server.is_open()


async def test_a_replica_that_serve_does_not_list_says_so_at_its_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "LISTED_SECONDS", 0.05)
    never = ToolReplica.__new__(ToolReplica)
    never._members = Members(Member(id="r", url="http://127.0.0.1:1"))
    with pytest.raises(StartError, match=r"Ray Serve has not listed replica r in 0\.05 s"):
        await never._serve_port()
    await never.__del__()  # it never started: there is nothing to close
    monkeypatch.setattr(ToolReplica, "__del__", lambda self: None)  # Python calls it too, and Serve keeps it from that
