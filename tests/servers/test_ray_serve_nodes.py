"""One server over two Ray nodes (both on this machine)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from serve_harness import LiveServer, new_cluster, observed

from verl_tool.client import ToolClient
from verl_tool.protocol import FaultKind, StepRequest

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(180)]

COUNT = "<ray_counter>0</ray_counter>"


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def server(nodes: Cluster) -> Iterator[LiveServer]:
    with new_cluster(ray_address=nodes.address) as cluster:
        yield LiveServer(cluster)


async def test_trajectories_live_on_both_nodes_and_die_with_their_own(nodes, server):
    await deploy(server, several_nodes=True, api_key="secret")
    async with ToolClient(server.url, api_key="secret", timeout=60.0, max_retries=8) as client:
        ids = [f"node-{i}" for i in range(100)]
        first = {r.trajectory_id: observed(r.observation) for r in await client.step(requests(ids, 0))}
        assert {count for count, _ in first.values()} == {"1"}
        homes = {pid for _, pid in first.values()}
        assert len(homes) == 2
        assert len({replica["node"] for replica in server.replicas(api_key="secret")}) == 2

        await asyncio.to_thread(nodes.remove_node, nodes.worker_nodes.copy().pop())
        second = {result.trajectory_id: result for result in await client.step(requests(ids, 1))}
        alive = {observed(r.observation)[1] for r in second.values() if r.fault is None}
        assert len(alive) == 1
        for trajectory_id, result in second.items():
            if first[trajectory_id][1] in alive:
                assert observed(result.observation) == ("2", first[trajectory_id][1])
            else:
                assert result.fault is not None
                assert result.fault.kind == FaultKind.STATE_LOST


async def test_without_a_key_the_direct_servers_on_the_network_are_for_replicas_only(nodes, server):
    await deploy(server, several_nodes=True)
    async with ToolClient(server.url) as client:
        ids = [f"closed-{i}" for i in range(40)]
        for step in range(3):
            results = await client.step(requests(ids, step))
            assert {observed(result.observation)[0] for result in results} == {str(step + 1)}
    assert server.replicas() == []


async def deploy(server: LiveServer, **settings: object) -> None:
    """Two replicas of the counter, one on each node: there is room for one on each."""
    wanted = server.settings("ray_counter.py", **settings)
    await asyncio.to_thread(server.cluster.deploy, wanted, 2, cpus_per_replica=1.5)


def requests(ids: list[str], step: int) -> list[StepRequest]:
    return [StepRequest(trajectory_id, COUNT, step) for trajectory_id in ids]
