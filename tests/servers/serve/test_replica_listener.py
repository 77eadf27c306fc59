"""Where Serve's gRPC server of a replica listens. In a live replica: `test_ray_serve_cli.py`."""

from __future__ import annotations

import inspect

import grpc
import psutil
import pytest

ray = pytest.importorskip("ray")
from ray.serve._private import replica  # noqa: E402

from verl_tool.servers.serve.replica_listener import ServeChangedError, listen_on_the_node_only  # noqa: E402


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


def test_serve_starts_it_by_the_name_that_is_replaced():
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica)


async def test_it_listens_on_the_nodes_address():
    listen_on_the_node_only()
    server = grpc.aio.server()
    port = replica.add_port_to_grpc_server(server, "[::]:0")
    await server.start()
    try:
        connections = psutil.Process().net_connections("tcp")
        found = {c.laddr.ip for c in connections if c.laddr.port == port and c.status == psutil.CONN_LISTEN}
        assert found <= {"127.0.0.1", "::ffff:127.0.0.1"}
        assert found
    finally:
        await server.stop(None)


def test_another_serve_is_refused(monkeypatch):
    monkeypatch.delattr(replica, "add_port_to_grpc_server")
    with pytest.raises(ServeChangedError, match=r"has no .*add_port_to_grpc_server"):
        listen_on_the_node_only()
