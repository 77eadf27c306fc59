"""ToolClient.fork against real servers, directly and through a proxy that breaks things."""

from __future__ import annotations

from collections import deque

import pytest
from live_server import LiveServers
from saboteur import BUSY, DROP_AFTER, DROP_BEFORE, GARBAGE, PASS, Saboteur
from toy_tools import Ledger, text

from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind, ReplicaInfo, ReplicaList
from verl_tool.servers.replica.router import Router


async def test_both_trajectories_go_on(servers: LiveServers) -> None:
    server = await servers.start([Ledger()])
    async with ToolClient(server.url) as client:
        await client.call("a", "<ledger>x</ledger>", step=0)
        await client.fork("a", "b")
        assert text((await client.call("b", "<ledger>y</ledger>", step=1)).observation) == "x,y"
        assert text((await client.call("a", "<ledger>z</ledger>", step=1)).observation) == "x,z"


async def test_a_broken_connection_forks_once(servers: LiveServers) -> None:
    ledger = Ledger()
    server = await servers.start([ledger])
    async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
        await client.call("a", "<ledger>x</ledger>", step=0)
        proxy.plan = deque([DROP_BEFORE, DROP_AFTER, BUSY, PASS])
        await client.fork("a", "b")
        assert ledger.forks == 1
        proxy.plan = deque([GARBAGE])
        with pytest.raises(ToolFault, match="no ForkResponse"):
            await client.fork("a", "c")


async def test_faults_are_raised_by_their_kind(servers: LiveServers) -> None:
    server = await servers.start([Ledger()], api_key="secret")
    async with ToolClient(server.url, api_key="secret", max_retries=0) as client:
        await client.call("a", "<ledger>x</ledger>", step=0)
        for source, new, kind in (("nobody", "b", FaultKind.STATE_LOST), ("a", "a", FaultKind.BAD_REQUEST)):
            with pytest.raises(ToolFault) as caught:
                await client.fork(source, new)
            assert (caught.value.kind, caught.value.retryable) == (kind, False)
        with pytest.raises(ValueError, match="trajectory id is ''"):
            await client.fork("a", "")
    async with ToolClient(server.url, api_key="wrong", direct=False) as client:
        with pytest.raises(ConfigError, match="api_key"):
            await client.fork("a", "b")


class _Two(Router):
    list = ReplicaList()

    async def replicas(self) -> ReplicaList:
        return self.list


async def test_later_steps_go_straight_to_the_replica_that_holds_it(servers: LiveServers) -> None:
    ledgers = [Ledger(), Ledger()]
    live = [await servers.start([ledger], router=_Two(f"r{i}")) for i, ledger in enumerate(ledgers)]
    _Two.list = ReplicaList(replicas=[ReplicaInfo(id=f"r{i}", url=server.url) for i, server in enumerate(live)])
    async with ToolClient(live[0].url) as client:
        for number in range(20):
            source, new = f"source-{number}", f"fork-{number}"
            await client.call(source, "<ledger>x</ledger>", step=0)
            await client.fork(source, new)
            assert text((await client.call(new, "<ledger>y</ledger>", step=1)).observation) == "x,y"
    assert all(ledger.forks for ledger in ledgers)
