"""A live server of several replicas: affinity, deaths, scaling, updates, back-pressure, reports."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import aiohttp
import psutil
import pytest
from serve_harness import LiveServer, finish, kill, new_cluster, observed, post
from server_command import gone
from toy_mcp import TOY, entry, offers_of, programs

from verl_tool.client import ToolClient
from verl_tool.formats import HERMES
from verl_tool.protocol import FaultKind, StepRequest
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.settings import AutoscalingSettings

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(180)]

COUNT = "<ray_counter>0</ray_counter>"
REPLICAS = 4
TRAJECTORIES = 2000
TURNS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LiveServer]:
    with new_cluster() as cluster:
        yield LiveServer(cluster)


@pytest.fixture
def counters(cluster: LiveServer) -> LiveServer:
    """Four replicas of the stateful counter."""
    cluster.deploy("ray_counter.py", REPLICAS)
    return cluster


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=64)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{i}" for i in range(count)]


async def count_by_http(session: aiohttp.ClientSession, url: str, ids: list[str]) -> dict[str, tuple[int, int]]:
    """One turn of every trajectory, in mixed batches without step numbers: its count and its replica's pid."""
    shuffled = random.Random(7).sample(ids, len(ids))
    batches = [shuffled[start : start + 40] for start in range(0, len(ids), 40)]
    counts: dict[str, tuple[int, int]] = {}
    gate = asyncio.Semaphore(16)

    async def one(batch: list[str]) -> None:
        async with gate:
            status, answer = await post(session, url, batch, COUNT)
        assert status == 200, answer
        assert answer["faults"] == [None] * len(batch)
        for trajectory_id, text in zip(batch, answer["observations"], strict=True):
            count, pid = observed(text)
            counts[trajectory_id] = int(count), pid

    await asyncio.gather(*map(one, batches))
    return counts


async def test_every_trajectory_stays_where_its_state_is_through_the_server_s_port(counters, session, record_property):
    ids = names("http", TRAJECTORIES)
    turns = [await count_by_http(session, counters.url, ids) for _ in range(TURNS)]
    for number, turn in enumerate(turns, start=1):
        assert {count for count, _ in turn.values()} == {number}
        assert {t: pid for t, (_, pid) in turn.items()} == {t: pid for t, (_, pid) in turns[0].items()}
    spread = Counter(pid for _, pid in turns[0].values())
    record_property("spread", sorted(spread.values()))
    assert len(spread) == REPLICAS
    assert min(spread.values()) > TRAJECTORIES / REPLICAS / 2
    await finish(session, counters.url, ids)


async def test_every_trajectory_stays_where_its_state_is_through_the_client(counters, session):
    ids = names("client", TRAJECTORIES)
    async with ToolClient(counters.url, max_batch=64) as client:
        owners: dict[str, int] = {}
        for step in range(TURNS):
            for result in await client.step([StepRequest(t, COUNT, step) for t in ids]):
                assert result.fault is None
                count, pid = observed(result.observation)
                assert int(count) == step + 1
                assert owners.setdefault(result.trajectory_id, pid) == pid
        assert len(set(owners.values())) == REPLICAS
        assert all(result.fault is None for result in await client.finish(ids))


async def fork(session: aiohttp.ClientSession, url: str, source: str, new: str) -> tuple[int, str]:
    """Status, and kind of the fault."""
    async with session.post(f"{url}/fork", json={"trajectory_id": source, "new_trajectory_id": new}) as response:
        answer = await response.json()
        return response.status, (answer["fault"] or {"kind": ""})["kind"]


async def test_a_fork_lands_where_its_source_is_whoever_is_asked(counters, session):
    sources, forks = names("source", 60), names("fork", 60)
    first = await count_by_http(session, counters.url, sources)
    assert len({pid for _, pid in first.values()}) == REPLICAS
    pairs = list(zip(sources, forks, strict=True))
    async with ToolClient(counters.url) as client:
        # Half by the server's port, which hands them to any replica, half by the client, which knows the owner.
        answers = await asyncio.gather(*(fork(session, counters.url, *pair) for pair in pairs[:30]))
        assert answers == [(200, "")] * 30
        await asyncio.gather(*(client.fork(*pair) for pair in pairs[30:]))
        by_client = await client.step([StepRequest(new, COUNT, 0) for new in forks])
    by_http = await count_by_http(session, counters.url, forks)
    again = await count_by_http(session, counters.url, sources)
    for (source, new), result in zip(pairs, by_client, strict=True):
        assert result.fault is None, result.fault
        assert observed(result.observation) == ("2", first[source][1])
        assert by_http[new] == (3, first[source][1])
        assert again[source] == (2, first[source][1])
    elsewhere = next(other for other in sources if first[other][1] != first[sources[0]][1])
    assert await fork(session, counters.url, sources[0], elsewhere) == (400, "bad_request")
    assert await fork(session, counters.url, "nobody", "nobody's fork") == (404, "state_lost")
    await finish(session, counters.url, [*sources, *forks])


async def test_a_killed_replica_loses_its_own_trajectories_and_no_other(counters, session):
    ids = names("killed", 400)
    first = await count_by_http(session, counters.url, ids)
    victim = first[ids[0]][1]
    counts = {t: count for t, (count, _) in first.items()}

    async def turn(client: ToolClient, trajectory_id: str, step: int) -> None:
        """It counts on at its place, or its replica is dead."""
        result = await client.call(trajectory_id, "<ray_counter>0.05</ray_counter>", step=step)
        pid = first[trajectory_id][1]
        if result.fault is not None:
            assert (result.fault.kind, pid) == (FaultKind.STATE_LOST, victim)
            counts[trajectory_id] = -1
        else:
            counts[trajectory_id] += 1
            assert observed(result.observation) == (str(counts[trajectory_id]), pid)

    async def turns(client: ToolClient, trajectory_id: str) -> None:
        for step in range(1, 10):
            await turn(client, trajectory_id, step)

    async with ToolClient(counters.url, timeout=60.0, max_retries=8) as client:
        load = asyncio.gather(*(turns(client, t) for t in ids))
        await asyncio.sleep(0.5)
        kill(victim)
        await load
        await asyncio.to_thread(counters.wait_for, lambda: len(counters.replica_ids()) == REPLICAS, "a replacement")
        await asyncio.gather(*(turn(client, t, 10) for t in ids))
        assert {t for t, count in counts.items() if count == -1} == {t for t in ids if first[t][1] == victim}

        # Without a step number, too, nothing lost begins afresh in silence; and what is new finds a place.
        lost = [t for t in ids if counts[t] == -1]
        for result in await client.step([StepRequest(t, COUNT) for t in lost]):
            assert result.fault is not None
            assert result.fault.kind == FaultKind.STATE_LOST
        fresh = await client.step([StepRequest(t, COUNT, 0) for t in names("after", 200)])
        assert len({observed(result.observation)[1] for result in fresh}) == REPLICAS
    await finish(session, counters.url, [*ids, *names("after", 200)])


async def test_health_and_metrics_tell_of_all_replicas(counters, session):
    await count_by_http(session, counters.url, names("told", 80))
    async with session.get(f"{counters.url}/health") as response:
        report = await response.json()
    assert {report["replica"], *(peer["replica"] for peer in report["replicas"])} == await asyncio.to_thread(
        counters.replica_ids
    )
    assert {peer["status"] for peer in report["replicas"]} == {"healthy"}
    async with session.get(f"{counters.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    calls = [line for line in lines if line.startswith("verl_tool_calls_total{")]
    assert len(calls) == REPLICAS
    assert sum(float(line.rsplit(" ", 1)[1]) for line in calls) >= 80
    await finish(session, counters.url, names("told", 80))


@pytest.mark.e2e
async def test_the_number_of_replicas_follows_the_queue_and_moves_no_living_trajectory(cluster, session):
    scaling = AutoscalingSettings(
        min_replicas=2,
        max_replicas=3,
        target_entries=4,
        upscale_delay_seconds=0.5,
        downscale_delay_seconds=1.0,
        look_back_seconds=2,
    )
    await asyncio.to_thread(cluster.deploy, "ray_counter.py", scaling)
    ids = names("scaled", 200)
    first = await count_by_http(session, cluster.url, ids)
    async with ToolClient(cluster.url, timeout=60.0) as client:
        scaled = asyncio.Event()

        async def busy(number: int) -> None:
            while not scaled.is_set():
                result = await client.call(f"busy-{number}", "<ray_counter>0.5</ray_counter>")
                assert result.fault is None, result.fault

        load = [asyncio.create_task(busy(number)) for number in range(24)]
        try:
            await asyncio.to_thread(cluster.wait_for, lambda: len(cluster.replica_ids()) == 3, "a third replica")
        finally:
            scaled.set()
            await asyncio.gather(*load)
    second = await count_by_http(session, cluster.url, ids)
    assert second == {t: (2, pid) for t, (_, pid) in first.items()}
    new = await count_by_http(session, cluster.url, names("scaled-new", 100))
    assert len({pid for _, pid in new.values()}) == 3

    # One of the three is taken away again; it stays for what lives in it.
    await asyncio.to_thread(cluster.wait_for, lambda: len(cluster.replica_ids()) == 2, "two replicas")
    third = await count_by_http(session, cluster.url, [*ids, *new])
    assert third == {t: (3, pid) for t, (_, pid) in first.items()} | {t: (2, pid) for t, (_, pid) in new.items()}
    await finish(session, cluster.url, [*ids, *new, *names("busy", 24)])


async def test_an_update_leaves_living_trajectories_where_they_are(cluster, session):
    await asyncio.to_thread(cluster.deploy, "ray_counter.py", 2)
    old = await asyncio.to_thread(cluster.replica_ids)
    ids = names("updated", 100)
    first = await count_by_http(session, cluster.url, ids)
    deploying = asyncio.create_task(asyncio.to_thread(cluster.deploy, "ray_counter.py", 2, done_if_invalid=True))
    await asyncio.to_thread(cluster.wait_for, lambda: bool(cluster.replica_ids() - old), "a new replica")
    second = await count_by_http(session, cluster.url, ids)
    assert second == {t: (2, pid) for t, (_, pid) in first.items()}
    await finish(session, cluster.url, ids)
    await deploying
    await asyncio.to_thread(cluster.wait_for, lambda: not cluster.replica_ids() & old, "only new replicas")


BOXED, PLAIN = (HERMES.write_call(f"mcp__{server}__count", {}) for server in ("boxed", "plain"))
"""They count the calls of a trajectory in two MCP servers of its own, one in the sandbox and one beside it."""


async def count_by_mcp(client: ToolClient, ids: list[str], step: int) -> dict[str, tuple[int, psutil.Process]]:
    """Two turns of every trajectory, one with each MCP server: its count, the same in both, and its replica."""
    boxed = await client.step([StepRequest(t, BOXED, 2 * step) for t in ids])
    plain = await client.step([StepRequest(t, PLAIN, 2 * step + 1) for t in ids])
    counts: dict[str, tuple[int, psutil.Process]] = {}
    for trajectory_id, one, other in zip(ids, boxed, plain, strict=True):
        assert (one.fault, other.fault) == (None, None)
        count, pid = map(int, re.findall(r"\d+", other.observation))
        assert int(re.findall(r"\d+", one.observation)[0]) == count
        counts[trajectory_id] = count, psutil.Process(psutil.Process(pid).ppid())
    return counts


async def test_an_mcp_server_s_state_is_with_its_trajectory_s_replica_and_is_lost_with_it(cluster):
    mcp = McpConfig.parse({"mcpServers": {"boxed": entry(sandbox=True, readable=[TOY]), "plain": entry()}})
    settings = {"tool_type": "", "mcp": mcp, "mcp_offers": await offers_of(mcp)}
    await asyncio.to_thread(lambda: cluster.deploy("", 2, **settings))
    ids, new = names("mcp", 8), names("mcp-new", 4)
    async with ToolClient(cluster.url, timeout=60.0, max_retries=8) as client:
        first = await count_by_mcp(client, ids, 0)
        assert {count for count, _ in first.values()} == {1}
        assert await count_by_mcp(client, ids, 1) == {t: (2, replica) for t, (_, replica) in first.items()}
        victim = first[ids[0]][1]
        lost = [t for t in ids if first[t][1] == victim]
        left = [t for t in ids if t not in lost]
        servers = programs(victim)
        assert len(servers) == 2 * len(lost)
        kill(victim.pid)
        assert gone(servers, seconds=20) == []
        for step in (4, None):
            for result in await client.step([StepRequest(t, PLAIN, step) for t in lost]):
                assert result.fault is not None
                assert result.fault.kind == FaultKind.STATE_LOST
        assert await count_by_mcp(client, left, 2) == {t: (3, first[t][1]) for t in left}
        assert {count for count, _ in (await count_by_mcp(client, new, 0)).values()} == {1}
        assert all(result.fault is None for result in await client.finish([*ids, *new]))
    assert gone(programs(), seconds=20) == []


async def test_a_full_replica_refuses_at_both_servers(cluster, session):
    await asyncio.to_thread(cluster.deploy, "ray_echo.py", 1, max_concurrent_requests=2, max_queued_requests=4)
    _, replicas = await asyncio.to_thread(cluster.get, "/replicas")
    urls = [cluster.url, replicas["replicas"][0]["url"]]

    async def one(number: int) -> tuple[int, str | None]:
        body = {"trajectory_ids": [f"full-{number}"], "actions": ["<ray_echo>x:1</ray_echo>"]}
        async with session.post(f"{urls[number % 2]}/get_observation", json=body) as response:
            await response.read()
            return response.status, response.headers.get("retry-after")

    answers = await asyncio.gather(*map(one, range(24)))
    assert Counter(status for status, _ in answers) == {200: 6, 503: 18}
    assert {wait for status, wait in answers if status == 503} == {"1"}
    assert (await one(0))[0] == 200


async def test_a_killed_replica_costs_no_stateless_call(cluster):
    await asyncio.to_thread(cluster.deploy, "ray_echo.py", 2)
    async with ToolClient(cluster.url, timeout=60.0, max_retries=8) as client:
        [first] = await client.step([StepRequest("pid", "<ray_echo>x</ray_echo>")])
        load = asyncio.gather(*(echo(client, number) for number in range(64)))
        await asyncio.sleep(0.4)
        kill(observed(first.observation)[1])
        assert await load == [20] * 64


async def echo(client: ToolClient, number: int) -> int:
    """Twenty calls one after the other; how many of them were answered with what was sent."""
    good = 0
    for turn in range(20):
        text = f"{number}.{turn}"
        result = await client.call(f"echo-{number}", f"<ray_echo>{text}</ray_echo>")
        assert result.fault is None, result.fault
        good += observed(result.observation)[0] == text
    return good


async def test_an_update_under_load_fails_no_request(cluster, session):
    await asyncio.to_thread(cluster.deploy, "ray_echo.py", 2)
    old = await asyncio.to_thread(cluster.replica_ids)
    updated = asyncio.Event()
    statuses: Counter[int] = Counter()

    async def plain(number: int) -> None:
        while not updated.is_set():
            status, answer = await post(session, cluster.url, [f"plain-{number}"], "<ray_echo>x</ray_echo>")
            statuses[status if answer.get("faults") == [None] else -1] += 1

    async def by_client(number: int) -> None:
        async with ToolClient(cluster.url) as client:
            while not updated.is_set():
                await echo(client, number)

    load = [asyncio.create_task(plain(n)) for n in range(8)] + [asyncio.create_task(by_client(n)) for n in range(4)]
    try:
        await asyncio.to_thread(cluster.deploy, "ray_echo.py", 2, done_if_invalid=True)
        await asyncio.to_thread(cluster.wait_for, lambda: not cluster.replica_ids() & old, "only new replicas")
        await asyncio.sleep(2.0)
    finally:
        updated.set()
        await asyncio.gather(*load)
    assert set(statuses) == {200}
    assert statuses[200] > 100


def forkservers() -> list[int]:
    """Outermost processes of the sandbox's workers in this test's own cluster."""
    return [p.pid for p in psutil.Process().children(recursive=True) if _is_outermost(p)]


def _is_outermost(process: psutil.Process) -> bool:
    try:
        parent = process.parent()
        return process.name() == "bwrap" and parent is not None and parent.name() != "bwrap"
    except psutil.NoSuchProcess:  # sandboxes come and go while one looks
        return False


async def test_killed_sandbox_workers_cost_no_call(cluster):
    """Forkservers die one after the other, each with programs under way in it."""
    await asyncio.to_thread(cluster.deploy, "", 1, tool_type="python_code")
    all_killed = asyncio.Event()
    async with ToolClient(cluster.url, timeout=60.0, max_retries=8) as client:

        async def compute(number: int) -> int:
            turn = 0
            while turn < 10 or not all_killed.is_set():
                code = f"import time; time.sleep(0.05); print({number} * 1000 + {turn})"
                result = await client.call(f"compute-{number}", f"```python\n{code}\n```")
                assert result.fault is None, result.fault
                assert f"\n{number * 1000 + turn}\n" in result.observation
                turn += 1
            return turn

        load = asyncio.gather(*(compute(number) for number in range(16)))
        try:
            for _ in range(3):
                await asyncio.sleep(0.5)
                kill(random.choice(forkservers()))
        finally:
            all_killed.set()
            turns = await load
        assert min(turns) >= 10
