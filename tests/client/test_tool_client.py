"""ToolClient against real servers, directly and through a proxy that breaks things."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import pytest
from live_server import LiveServer, LiveServers, serve_asgi
from saboteur import (
    BUSY,
    DROP_AFTER,
    DROP_BEFORE,
    FAIL,
    GARBAGE,
    HALF,
    HANG,
    NOT_FOUND,
    PASS,
    RESET_AFTER,
    Saboteur,
)
from starlette.types import Receive, Scope, Send
from toy_tools import Crowded, Ledger, Puppet, text, until

from verl_tool.client import ToolClient, tool_client
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import RESENT, FaultKind, ReplicaInfo, ReplicaList, StepRequest, StepResult
from verl_tool.servers.replica import asgi_app
from verl_tool.servers.replica.router import Router
from verl_tool.servers.serve.ports import free_ports
from verl_tool.util.rendezvous import owner

SAY_HI = "<puppet>say hi</puppet>"


def fault_kind(result: StepResult) -> FaultKind | None:
    return result.fault.kind if result.fault else None


class TestCalls:
    @pytest.mark.parametrize("ending", ["", "/", "/get_observation", "/get_observation/"])
    async def test_the_url_may_end_in_the_route(self, servers: LiveServers, ending: str) -> None:
        server = await servers.start([Puppet()])
        async with ToolClient(server.url + ending) as client:
            result = await client.call("t", SAY_HI, step=0)
        assert text(result.observation) == "hi"
        assert result.valid
        assert result.fault is None

    async def test_everything_of_a_request_arrives_and_everything_of_a_result_comes_back(
        self, servers: LiveServers
    ) -> None:
        server = await servers.start([Puppet()])
        async with ToolClient(server.url) as client:
            results = await client.step(
                [
                    StepRequest("a", "<puppet>extra stdin</puppet>", 0, extra={"stdin": "42 \ud800"}),
                    StepRequest("b", "<puppet>reward 0.5</puppet>"),
                    StepRequest("c", "<puppet>image aGk=</puppet>"),
                    StepRequest("d", "<puppet>end bye</puppet>"),
                    StepRequest("e", "nothing \udfff"),
                    StepRequest("f", "", finish=True),
                ]
            )
        assert text(results[0].observation) == "42 \ufffd"
        assert results[1].reward == 0.5
        assert results[1].metrics == {"rewarded": 1.0}
        assert results[2].image == "aGk="
        assert results[3].done
        assert not results[4].valid
        assert results[4].invalid_reason
        assert results[5].done
        assert [r.trajectory_id for r in results] == list("abcdef")

    async def test_large_calls_go_in_batches_and_keep_their_order(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, max_batch=10) as client:
            results = await client.step([StepRequest(f"t{i}", f"<puppet>say {i}</puppet>", 0) for i in range(95)])
            assert [text(r.observation) for r in results] == [str(i) for i in range(95)]
            assert sorted(len(body["actions"]) for body in proxy.bodies) == [5] + [10] * 9

    async def test_entries_of_one_trajectory_stay_together_and_in_order(self, servers: LiveServers) -> None:
        server = await servers.start([Ledger()])
        async with ToolClient(server.url, max_batch=2) as client:
            requests = [StepRequest(f"t{i % 3}", f"<ledger>{i}</ledger>", i // 3) for i in range(12)]
            results = await client.step(requests)
        assert [text(r.observation) for r in results[-3:]] == ["0,3,6,9", "1,4,7,10", "2,5,8,11"]

    async def test_a_call_of_nothing_is_nothing(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with ToolClient(server.url) as client:
            assert await client.step([]) == []

    async def test_finish_frees_the_state(self, servers: LiveServers) -> None:
        server = await servers.start([Ledger()])
        async with ToolClient(server.url) as client:
            await client.call("t", "<ledger>a</ledger>", step=0)
            assert server.app.toolset.trajectories() == ["t"]
            assert all(result.done for result in await client.finish(["t", "unknown"]))
            assert server.app.toolset.trajectories() == []

    async def test_health_tools_and_a_fault_of_the_tool(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet(), Ledger()])
        async with ToolClient(server.url) as client:
            assert (await client.health()).status == "healthy"
            assert [tool.name for tool in await client.tools()] == ["puppet", "ledger"]
            assert fault_kind(await client.call("t", "<puppet>crash x</puppet>", step=0)) is FaultKind.TOOL_CRASHED

    async def test_the_api_key_is_sent_and_a_wrong_one_is_an_error(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], api_key="secret")
        async with ToolClient(server.url, api_key="secret") as client:
            assert text((await client.call("t", SAY_HI)).observation) == "hi"
        async with ToolClient(server.url, api_key="wrong") as client:
            with pytest.raises(ConfigError, match="api key"):
                await client.call("t", SAY_HI)

    async def test_wrong_use_raises_and_sends_nothing(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        good = StepRequest("t", SAY_HI)
        wrong: list[tuple[StepRequest, type[Exception]]] = [
            (StepRequest("", SAY_HI), ValueError),
            (StepRequest("t", None), TypeError),  # type: ignore[arg-type]
            (StepRequest("t", SAY_HI, -1), ValueError),
            (StepRequest("t", SAY_HI, extra={"x": object()}), TypeError),
        ]
        async with ToolClient(server.url) as client:
            for request, error in wrong:
                with pytest.raises(error):
                    await client.step([good, request])
        assert puppet.runs == []

    @pytest.mark.parametrize(
        "options",
        [{"timeout": 0}, {"max_retries": -1}, {"max_workers": 0}, {"request_interval": -1}, {"max_batch": 0}],
    )
    def test_wrong_options_are_named(self, options: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            ToolClient("http://127.0.0.1:1", **options)  # type: ignore[arg-type]

    def test_a_url_without_a_scheme_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="http://"):
            ToolClient("localhost:5000")

    async def test_a_body_over_the_servers_limit_is_halved(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], max_body_bytes=3000)
        async with ToolClient(server.url) as client:
            requests = [StepRequest(f"t{i}", f"<puppet>say {i}{'x' * 500}</puppet>", 0) for i in range(20)]
            huge = StepRequest("huge", "x" * 4000, 0)
            results = await client.step([*requests, huge])
        assert all(text(r.observation).startswith(str(i)) for i, r in enumerate(results[:-1]))
        assert fault_kind(results[-1]) is FaultKind.BAD_REQUEST


class TestRetries:
    @pytest.mark.parametrize("harm", [DROP_BEFORE, DROP_AFTER, RESET_AFTER, HALF, GARBAGE, BUSY, FAIL, NOT_FOUND])
    async def test_a_step_survives_any_single_harm_and_runs_once(self, servers: LiveServers, harm: str) -> None:
        server = await servers.start([Ledger()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            await client.call("t", "<ledger>a</ledger>", step=0)
            proxy.plan = deque([harm])
            assert text((await client.call("t", "<ledger>b</ledger>", step=1)).observation) == "a,b"
            assert text((await client.call("t", "<ledger>c</ledger>", step=2)).observation) == "a,b,c"

    @pytest.mark.parametrize("harm", [DROP_AFTER, RESET_AFTER, HALF, GARBAGE])
    async def test_without_a_step_a_stateful_call_that_may_have_run_is_not_sent_again(
        self, servers: LiveServers, harm: str
    ) -> None:
        server = await servers.start([Ledger()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            proxy.plan = deque([harm])
            result = await client.call("t", "<ledger>a</ledger>")
            assert fault_kind(result) is FaultKind.UNREACHABLE
            assert not result.fault.retryable  # type: ignore[union-attr]
            assert len(proxy.bodies) == 1

    @pytest.mark.parametrize(
        ("harms", "said"),
        [
            ([DROP_AFTER, BUSY, NOT_FOUND], ["", RESENT, RESENT, RESENT]),
            ([BUSY, NOT_FOUND, FAIL], ["", "", "", RESENT]),
        ],
    )
    async def test_a_repeated_first_call_carries_the_header_resent(
        self, servers: LiveServers, harms: list[str], said: list[str]
    ) -> None:
        server = await servers.start([Ledger()])
        async with Saboteur(server.url, deque(harms)) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            await client.call("t", "<ledger>a</ledger>", step=0)
            assert proxy.begun == said
            await client.call("t", "<ledger>b</ledger>", step=1)
            assert proxy.begun[-1] == ""

    @pytest.mark.parametrize("harm", [BUSY, NOT_FOUND])
    async def test_without_a_step_what_did_not_run_is_sent_again(self, servers: LiveServers, harm: str) -> None:
        server = await servers.start([Ledger()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            proxy.plan = deque([harm, harm])
            assert text((await client.call("t", "<ledger>a</ledger>")).observation) == "a"

    async def test_without_a_step_a_stateless_call_is_sent_again(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            proxy.plan = deque([DROP_AFTER])
            assert text((await client.call("t", SAY_HI)).observation) == "hi"

    async def test_a_question_that_breaks_too_does_not_cost_a_stateless_call(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            proxy.plan = deque([DROP_AFTER])
            proxy.question_plan = deque([DROP_AFTER, FAIL])
            assert text((await client.call("t", SAY_HI)).observation) == "hi"
            assert not proxy.question_plan

    async def test_a_server_of_another_make_never_gets_a_step_twice(self, servers: LiveServers) -> None:
        """It has no record of steps: what may have run is not sent again, though it bears its step."""
        server = await servers.start([Ledger()])
        hidden = frozenset({"/replicas", "/tools"})
        async with Saboteur(server.url, hidden_paths=hidden) as proxy, ToolClient(proxy.url) as client:
            proxy.plan = deque([DROP_AFTER])
            result = await client.call("t", "<ledger>a</ledger>", step=0)
            assert fault_kind(result) is FaultKind.UNREACHABLE
            assert len(proxy.bodies) == 1

    async def test_only_the_entries_that_failed_are_sent_again(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            puppet.failures = 1
            requests = [StepRequest("a", SAY_HI, 0), StepRequest("b", "<puppet>flaky ok</puppet>", 0)]
            results = await client.step(requests)
            assert [text(r.observation) for r in results] == ["hi", "ok"]
            assert [body["trajectory_ids"] for body in proxy.bodies] == [["a", "b"], ["b"]]

    async def test_a_fault_that_is_not_retryable_is_not_retried(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            assert fault_kind(await client.call("t", "<puppet>crash x</puppet>", step=0)) is FaultKind.TOOL_CRASHED
            assert len(proxy.bodies) == 1

    async def test_retries_end_at_max_retries(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01, max_retries=2) as client:
            proxy.plan = deque([BUSY] * 10)
            result = await client.call("t", SAY_HI, step=0)
            assert fault_kind(result) is FaultKind.OVERLOADED
            assert result.fault.retryable  # type: ignore[union-attr]
            assert len(proxy.bodies) == 3

    async def test_retry_after_is_honoured(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url, retry_after="0.5") as proxy, ToolClient(proxy.url, retry_delay=0.0) as client:
            proxy.plan = deque([BUSY])
            assert (await client.call("t", SAY_HI, step=0)).fault is None
            assert proxy.times[1] - proxy.times[0] >= 0.5

    async def test_the_deadline_covers_all_retries(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        loop = asyncio.get_running_loop()
        async with (
            Saboteur(server.url, retry_after="0.3") as proxy,
            ToolClient(proxy.url, timeout=1.0, max_retries=100) as client,
        ):
            proxy.plan = deque([BUSY] * 100)
            began = loop.time()
            assert fault_kind(await client.call("t", SAY_HI, step=0)) is FaultKind.OVERLOADED
            assert loop.time() - began < 2.0
            proxy.plan = deque([HANG])
            began = loop.time()
            assert fault_kind(await client.call("u", SAY_HI, step=0)) is FaultKind.TIMEOUT
            assert 0.8 < loop.time() - began < 2.5

    async def test_as_many_retries_as_a_long_outage_takes(self, servers: LiveServers, monkeypatch) -> None:
        monkeypatch.setattr(tool_client, "_MIN_DELAY_SECONDS", 0.0)
        server = await servers.start([Puppet()])
        async with Saboteur(server.url, retry_after="0") as proxy, ToolClient(proxy.url, retry_delay=0.0) as client:
            proxy.plan = deque([BUSY] * 1500)
            assert (await client.call("t", SAY_HI, step=0)).fault is None
            assert len(proxy.bodies) == 1501

    async def test_nobody_there_is_unreachable(self) -> None:
        (port,) = free_ports(1)
        async with ToolClient(f"http://127.0.0.1:{port}", retry_delay=0.01, max_retries=1) as client:
            result = await client.call("t", SAY_HI)
            assert fault_kind(result) is FaultKind.UNREACHABLE
            assert result.fault.retryable  # type: ignore[union-attr]
            with pytest.raises(ToolFault, match="unreachable"):
                await client.health()
            with pytest.raises(ToolFault, match="unreachable"):
                await client.tools()

    async def test_a_server_that_starts_late_is_waited_for(self, servers: LiveServers) -> None:
        (port,) = free_ports(1)
        async with ToolClient(f"http://127.0.0.1:{port}", retry_delay=0.1, max_retries=10) as client:
            call = asyncio.create_task(client.call("t", SAY_HI))
            await asyncio.sleep(0.2)
            await servers.start([Puppet()], port=port)
            assert text((await call).observation) == "hi"

    async def test_a_server_that_is_away_is_waited_for_until_the_deadline(self, servers: LiveServers) -> None:
        (port,) = free_ports(1)
        async with ToolClient(f"http://127.0.0.1:{port}", retry_delay=0.01, timeout=20.0) as client:
            call = asyncio.create_task(client.call("t", SAY_HI))
            question = asyncio.create_task(client.tools())
            await asyncio.sleep(1.5)  # four tries take a tenth of that
            await servers.start([Puppet()], port=port)
            assert text((await call).observation) == "hi"
            assert [tool.name for tool in await question] == ["puppet"]

    async def test_what_a_tool_answers_is_tried_a_few_times(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        puppet.failures = 100
        async with ToolClient(server.url, retry_delay=0.01) as client:
            assert fault_kind(await client.call("t", "<puppet>flaky ok</puppet>", step=0)) is not None
            assert puppet.failures == 96

    async def test_a_batch_that_breaks_does_not_touch_the_other_batches(self, servers: LiveServers) -> None:
        server = await servers.start([Ledger()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, max_batch=1, max_workers=1) as client:
            proxy.plan = deque([PASS, DROP_AFTER, PASS])
            results = await client.step([StepRequest(f"t{i}", "<ledger>a</ledger>") for i in range(3)])
            assert [fault_kind(r) for r in results].count(None) == 2
            assert [fault_kind(r) for r in results].count(FaultKind.UNREACHABLE) == 1


class TestLimits:
    async def test_no_more_than_max_workers_requests_at_a_time(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, max_workers=4) as client:
            calls = [client.call(f"t{i}", "<puppet>sleep 0.02</puppet>", step=0) for i in range(40)]
            results = await asyncio.gather(*calls)
            assert all(r.fault is None for r in results)
            assert proxy.most_connections <= 4

    async def test_requests_begin_at_the_interval(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, request_interval=0.1) as client:
            await asyncio.gather(*(client.call(f"t{i}", SAY_HI, step=0) for i in range(5)))
            assert proxy.times[-1] - proxy.times[0] >= 0.3

    async def test_connections_are_used_again(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url) as client:
            for i in range(20):
                await client.call(f"t{i}", SAY_HI, step=0)
            assert proxy.most_connections == 1

    async def test_a_cancelled_call_leaves_no_task_and_no_connection(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        async with ToolClient(server.url, max_batch=1) as client:
            await client.call("warm", SAY_HI)
            requests = [StepRequest(f"t{i}", "<puppet>sleep 30</puppet>") for i in range(10)]
            calls = asyncio.ensure_future(client.step(requests))
            await until(lambda: len(puppet.runs) == 11)
            calls.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls
            ours = [
                task for task in asyncio.all_tasks() if "ToolClient" in getattr(task.get_coro(), "__qualname__", "")
            ]
            assert ours == []
            await until(lambda: len(server.server.server_state.connections) <= 1)
            await until(lambda: server.app.admission.inside == 0)
            assert text((await client.call("after", SAY_HI)).observation) == "hi"


class _Listing(Router):
    """Tells a list of replicas that the test writes."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.list = ReplicaList()

    async def replicas(self) -> ReplicaList:
        return self.list


class TestReplicas:
    async def _two(self, servers: LiveServers, ledgers: list[Ledger]) -> tuple[LiveServer, LiveServer]:
        routers = [_Listing("r0"), _Listing("r1")]
        live = [await servers.start([ledger], router=router) for ledger, router in zip(ledgers, routers, strict=True)]
        told = ReplicaList(replicas=[ReplicaInfo(id=f"r{i}", url=server.url) for i, server in enumerate(live)])
        for router in routers:
            router.list = told
        return live[0], live[1]

    async def test_each_trajectory_goes_straight_to_its_owner_on_every_turn(self, servers: LiveServers) -> None:
        one, two = await self._two(servers, [Ledger(), Ledger()])
        ids = [f"t{i}" for i in range(50)]
        async with ToolClient(one.url) as client:
            for step in range(3):
                results = await client.step([StepRequest(tid, f"<ledger>{step}</ledger>", step) for tid in ids])
        assert {text(r.observation) for r in results} == {"0,1,2"}
        expected = {tid for tid in ids if owner(tid, ["r0", "r1"]) == "r0"}
        assert set(one.app.toolset.trajectories()) == expected
        assert set(two.app.toolset.trajectories()) == set(ids) - expected
        assert 10 < len(expected) < 40

    async def test_direct_false_sends_everything_through_the_ingress(self, servers: LiveServers) -> None:
        one, two = await self._two(servers, [Ledger(), Ledger()])
        async with ToolClient(one.url, direct=False) as client:
            await client.step([StepRequest(f"t{i}", "<ledger>a</ledger>", 0) for i in range(20)])
        assert len(one.app.toolset.trajectories()) == 20
        assert two.app.toolset.trajectories() == []

    async def test_a_replica_that_is_gone_is_gone_around(self, servers: LiveServers) -> None:
        front, _ = await self._two(servers, [Ledger(), Ledger()])
        (port,) = free_ports(1)
        dead = ReplicaInfo(id="r1", url=f"http://127.0.0.1:{port}")
        router = front.app.router
        assert isinstance(router, _Listing)
        router.list = ReplicaList(replicas=[ReplicaInfo(id="r0", url=front.url), dead])
        async with ToolClient(front.url, retry_delay=0.01) as client:
            results = await client.step([StepRequest(f"t{i}", "<ledger>a</ledger>", 0) for i in range(20)])
            assert all(r.fault is None for r in results)
        assert len(front.app.toolset.trajectories()) == 20


class TestOlderServers:
    async def test_a_server_that_knows_neither_steps_nor_faults(self) -> None:
        async def older(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                while True:
                    message = await receive()
                    await send({"type": f"{message['type']}.complete"})
                    if message["type"] == "lifespan.shutdown":
                        return
            body = (await receive())["body"]
            status, answer = 404, {"detail": "Not Found"}
            if scope["path"] == "/get_observation":
                n = len(json.loads(body)["actions"])
                long = {"obs": "long", "reward": 1.0, "tool_version": 3}
                status, answer = 200, {
                    "observations": (["short", long] * n)[:n],
                    "dones": [False] * n,
                    "valids": [True] * n,
                    "processing_time_ms": 1.0,
                }  # fmt: skip
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

        url, server, task = await serve_asgi(older)
        try:
            async with ToolClient(url) as client:
                results = await client.step([StepRequest(f"t{i}", "x", 0) for i in range(4)])
        finally:
            server.should_exit = True
            await task
        assert [r.observation for r in results] == ["short", "long", "short", "long"]
        assert [r.reward for r in results] == [None, 1.0, None, 1.0]
        assert all(r.fault is None for r in results)


class TestQueue:
    @pytest.fixture(autouse=True)
    def short_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(asgi_app, "HOLD_SECONDS", 0.2)

    async def test_a_call_may_wait_longer_in_a_queue_than_it_may_take(self, servers: LiveServers) -> None:
        tool = Crowded()
        server = await servers.start([tool])
        async with ToolClient(server.url, timeout=1.5, queue_timeout=60, retry_delay=0.05, max_retries=0) as client:
            calls = [client.call(f"t{i}", "<crowded>sleep 0.8</crowded>", step=0) for i in range(5)]
            assert [result.fault for result in await asyncio.gather(*calls)] == [None] * 5
            assert tool.runs == ["sleep 0.8"] * 5
            late = await client.call("late", "<crowded>sleep 5</crowded>", step=0)
            assert fault_kind(late) is FaultKind.TIMEOUT

    @pytest.mark.parametrize("queue_timeout", [0.0, 0.5])
    async def test_and_not_longer_than_queue_timeout(self, servers: LiveServers, queue_timeout: float) -> None:
        server = await servers.start([Crowded()])
        options = {"timeout": 0.5, "queue_timeout": queue_timeout}
        async with ToolClient(server.url) as patient, ToolClient(server.url, **options) as client:
            other = asyncio.create_task(patient.call("a", "<crowded>sleep 4</crowded>", step=0))
            await asyncio.sleep(0.1)
            result = await client.call("b", "<crowded>say hi</crowded>", step=0)
            assert not other.done()
            assert fault_kind(result) is FaultKind.QUEUED
            other.cancel()
