"""The store that ranks meet at: on one address, and as good as torch's own."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("wrapt")

import torch.distributed as dist

from verl_tool.platforms.process_group_store import STORE
from verl_tool.servers.serve.ports import free_ports

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def make_store(monkeypatch):
    # The package holds a function of the same name.
    module = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(module, "_create_c10d_store", module._create_c10d_store)
    STORE.install()
    return module._create_c10d_store


def addresses(port: int) -> set[str]:
    """Where this process listens on `port`."""
    connections = psutil.Process(os.getpid()).net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


@pytest.mark.parametrize("use_libuv", [True, False])
def test_it_listens_where_it_is_told(make_store, use_libuv):
    (port,) = free_ports(1)
    with ThreadPoolExecutor() as ranks:
        both = [ranks.submit(make_store, "127.0.0.1", port, rank, 2, TIMEOUT, use_libuv) for rank in range(2)]
        server, other = (future.result() for future in both)
    assert addresses(port) == {"127.0.0.1"}
    other.set("name", "value")
    assert server.get("name") == b"value"


def test_a_process_makes_a_second_one_at_the_same_port(make_store):
    (port,) = free_ports(1)
    stores = [make_store("127.0.0.1", port, 0, 1, TIMEOUT) for _ in range(2)]
    stores[0].set("name", "value")
    assert stores[1].get("name") == b"value"
    assert addresses(port) == {"127.0.0.1"}


def test_any_free_port_is_told(make_store):
    store = make_store("127.0.0.1", 0, 0, 1, TIMEOUT)
    assert addresses(store.port) == {"127.0.0.1"}


def test_rendezvous_by_url_takes_it(make_store):
    (port,) = free_ports(1)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1))
    assert (rank, size) == (0, 1)
    assert addresses(port) == {"127.0.0.1"}
    store.set("name", "value")
