"""The server's routes over real HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from live_server import LiveServer, LiveServers
from toy_tools import Ledger, Puppet, text, until

from verl_tool.errors import ConfigError
from verl_tool.protocol import ObservationResponse, StepRequest
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.asgi_app import ToolServerApp
from verl_tool.servers.replica.router import FORWARDED_HEADER, PEER_KEY_HEADER, Router

FROM_A_PEER = {FORWARDED_HEADER: "1", PEER_KEY_HEADER: "key of the peers"}
SAY_HI = "<puppet>say hi</puppet>"


async def post(server: LiveServer, body: Any, path: str = "/get_observation", **options: Any) -> tuple[int, Any]:
    """Status and JSON of the answer; `body` goes as it is if it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(server.url + path, data=data, **options) as response:
        return response.status, json.loads(await response.read())


async def get(server: LiveServer, path: str, **options: Any) -> tuple[int, str, aiohttp.typedefs.LooseHeaders]:
    async with aiohttp.ClientSession() as session, session.get(server.url + path, **options) as response:
        return response.status, await response.text(), response.headers


def batch(*actions: Any, **columns: Any) -> dict[str, Any]:
    return {"trajectory_ids": [f"t{i}" for i in range(len(actions))], "actions": list(actions), **columns}


class TestObservations:
    async def test_the_request_that_verl_tool_users_send(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet(), Ledger()])
        request = batch(
            SAY_HI,
            "<ledger>a</ledger>",
            "just thinking",
            extra_fields=[{"question": "?"}, {}, {}],
            finish=[False, False, False],
            is_last_step=[False, False, True],
            reward_hint=[1, 2, 3],
        )
        status, answer = await post(server, request)
        assert status == 200
        assert text(answer["observations"][0]) == "hi"
        assert text(answer["observations"][1]) == "a"
        assert answer["observations"][2]["invalid_reason"] == "no tool call found"
        assert answer["dones"] == [False] * 3
        assert answer["valids"] == [True, True, False]
        assert answer["faults"] == [None] * 3
        assert answer["processing_time_ms"] >= 0

    async def test_an_empty_request_gets_an_empty_answer(self, servers: LiveServers) -> None:
        status, answer = await post(await servers.start([Puppet()]), batch())
        assert status == 200
        assert answer["observations"] == []

    async def test_further_lists_reach_the_tool_and_extra_fields_win(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        ask = "<puppet>extra colour</puppet>"
        request = batch(ask, ask, colour=["red", "blue"], extra_fields=[None, {"colour": "green"}])
        _, answer = await post(server, request)
        assert [text(o) for o in answer["observations"]] == ["red", "green"]

    async def test_an_action_that_is_too_long_is_answered_unless_no_model_writes_so_much(
        self, servers: LiveServers
    ) -> None:
        server = await servers.start([Puppet()])
        _, answer = await post(server, batch(SAY_HI + "a" * 500_000, SAY_HI + "a" * (1 << 20), SAY_HI))
        assert "characters, and at most 393216" in str(answer["observations"][0])
        assert [fault and fault["kind"] for fault in answer["faults"]] == [None, "bad_request", None]

    async def test_one_bad_entry_costs_the_others_nothing(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        request = {
            "trajectory_ids": ["a", 7, "c", "d", "e"],
            "actions": [SAY_HI, SAY_HI, None, SAY_HI, SAY_HI],
            "steps": [0, 0, 0, "one", 0],
            "extra_fields": [{}, {}, {}, {}, {"tool_name": "nobody"}],
        }
        status, answer = await post(server, request)
        assert status == 200
        assert [fault and fault["kind"] for fault in answer["faults"]] == [None] + ["bad_request"] * 4
        assert text(answer["observations"][0]) == "hi"
        assert "trajectory_ids[1]" in answer["faults"][1]["message"]
        assert "actions[2]" in answer["faults"][2]["message"]
        assert "steps[3]" in answer["faults"][3]["message"]
        assert "known: puppet" in answer["faults"][4]["message"]

    async def test_images_and_rewards_come_in_the_long_form(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        _, answer = await post(server, batch("<puppet>image aGk=</puppet>", "<puppet>reward 0.5</puppet>"))
        assert answer["observations"][0]["image"] == "aGk="
        assert answer["observations"][1]["reward"] == 0.5
        assert answer["observations"][1]["metrics"] == {"rewarded": 1.0}
        ObservationResponse.model_validate(answer)

    async def test_nan_surrogates_and_objects_do_not_break_the_answer(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        actions = ("<puppet>reward nan</puppet>", "<puppet>surrogate x</puppet>", "<puppet>bytes x</puppet>", SAY_HI)
        status, answer = await post(server, batch(*actions))
        assert status == 200
        assert "reward" not in answer["observations"][0] or answer["observations"][0]["reward"] is None
        assert "\ufffd and \ufffd" in answer["observations"][1]
        assert answer["faults"][2]["kind"] == "tool_crashed"
        assert text(answer["observations"][3]) == "hi"

    async def test_surrogates_and_nan_in_a_request_are_taken(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        body = (
            b'{"trajectory_ids": ["a", "b"], "actions": ["<puppet>say \\ud800!</puppet>", '
            b'"<puppet>say \\ud83d\\ude00</puppet>"], "extra_fields": [{"x": NaN}, {}]}'
        )
        status, answer = await post(server, body)
        assert status == 200
        assert [text(o) for o in answer["observations"]] == ["\ufffd!", "\U0001f600"]

    async def test_a_repeated_step_is_not_run_again(self, servers: LiveServers) -> None:
        server = await servers.start([Ledger()])
        for _ in range(2):
            _, answer = await post(server, batch("<ledger>a</ledger>", steps=[0]))
            assert text(answer["observations"][0]) == "a"

    async def test_what_is_not_ready_in_time_is_a_fault_and_the_rest_is_answered(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], request_timeout_seconds=0.2)
        status, answer = await post(server, batch(SAY_HI, "<puppet>sleep 20</puppet>"))
        assert status == 200
        assert text(answer["observations"][0]) == "hi"
        assert answer["faults"][1]["kind"] == "timeout"

    async def test_a_client_that_leaves_stops_its_run(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        with pytest.raises(asyncio.TimeoutError):
            await post(server, batch("<puppet>sleep 30</puppet>"), timeout=aiohttp.ClientTimeout(total=0.3))
        await until(lambda: server.app.admission.inside == 0)
        assert not server.app.toolset._running
        assert puppet.ended == []

    async def test_a_thousand_trajectories_at_once(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        _, answer = await post(server, batch(*(f"<puppet>say {i}</puppet>" for i in range(1000))))
        assert [text(o) for o in answer["observations"]] == [str(i) for i in range(1000)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "field", "words"),
        [
            (b"\xff\xfe", None, "not UTF-8: byte 0"),
            (b'{"trajectory_ids": ["a"], ', None, "not JSON"),
            (b"[1, 2]", None, "array"),
            (b'{"actions": []}', "trajectory_ids", "missing"),
            (b'{"trajectory_ids": ["a"]}', "actions", "missing"),
            (b'{"trajectory_ids": "a", "actions": ["x"]}', "trajectory_ids", "list"),
            (b'{"trajectory_ids": ["a"], "actions": []}', "actions", "0 entries"),
            (b'{"trajectory_ids": ["a"], "actions": ["x"], "steps": [0, 1]}', "steps", "2 entries"),
            (b'{"trajectory_ids": ["a"], "actions": ["x"], "mode": "fast"}', "mode", "must be a list"),
            (b'{"trajectory_ids": ["a"], "actions": [3]}', "actions[0]", "send a string"),
            (
                b'{"trajectory_ids": ["a"], "actions": ["x"], "tool_name": ["nobody"]}',
                "tool_name",
                "'nobody' is unknown; known: puppet",
            ),
            (b'{"a":' * 5000 + b"1" + b"}" * 5000, None, "nested too deeply"),
        ],
    )
    async def test_a_bad_body_is_told_field_and_mend(
        self, servers: LiveServers, body: bytes, field: str | None, words: str
    ) -> None:
        server = await servers.start([Puppet()])
        status, answer = await post(server, body)
        assert status == 400
        assert answer["error"]["type"] == "bad_request"
        assert answer["error"]["field"] == field
        assert words in answer["error"]["message"]

    async def test_a_body_over_the_limit_is_refused_while_it_comes(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], max_body_bytes=100_000)
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /get_observation HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):  # 200 kB of a body that never ends
            writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        await writer.drain()
        status_line = await asyncio.wait_for(reader.readline(), 10)
        assert b"413" in status_line
        writer.close()

    async def test_a_body_just_within_the_limit_is_taken(self, servers: LiveServers) -> None:
        body = json.dumps(batch(SAY_HI)).encode()
        server = await servers.start([Puppet()], max_body_bytes=len(body))
        assert (await post(server, body))[0] == 200
        status, answer = await post(server, body + b" ")
        assert status == 413
        assert f"{len(body)} bytes" in answer["error"]["message"]

    async def test_an_unknown_path_lists_the_routes(self, servers: LiveServers) -> None:
        status, body, _ = await get(await servers.start([Puppet()]), "/observe")
        assert status == 404
        assert "POST /get_observation" in body

    async def test_a_wrong_method_is_told_the_right_one(self, servers: LiveServers) -> None:
        status, body, headers = await get(await servers.start([Puppet()]), "/get_observation")
        assert status == 405
        assert headers["allow"] == "POST"  # type: ignore[call-overload, index]
        assert "POST" in body

    async def test_without_the_right_token_nothing_is_served(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet], api_key="secret")
        for value in (None, "Bearer wrong", "secret", "Bearer secret2"):
            headers = {} if value is None else {"authorization": value}
            status, answer = await post(server, batch(SAY_HI), headers=headers)
            assert status == 401, value
            assert "Bearer" in answer["error"]["message"]
            assert puppet.runs == []
            for path in ("/tools", "/metrics", "/replicas", "/nowhere"):
                assert (await get(server, path, headers=headers))[0] == 401, (value, path)
        assert (await get(server, "/health"))[0] == 200
        assert (await post(server, batch(SAY_HI), headers={"authorization": "Bearer secret"}))[0] == 200

    async def test_a_full_queue_answers_503_with_retry_after(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], max_concurrent_requests=1, max_queued=1)
        slow = asyncio.create_task(post(server, batch("<puppet>sleep 1</puppet>", "<puppet>sleep 1</puppet>")))
        await asyncio.sleep(0.3)
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.observations_url, json=batch(SAY_HI)) as response,
        ):
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert (await response.json())["error"]["type"] == "overloaded"
        assert (await slow)[0] == 200
        assert (await post(server, batch(SAY_HI)))[0] == 200

    async def test_a_batch_that_never_fits_is_told_the_limit(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], max_concurrent_requests=2, max_queued=2)
        status, answer = await post(server, batch(*[SAY_HI] * 5))
        assert status == 413
        assert "at most 4" in answer["error"]["message"]

    async def test_a_stopping_server_says_so_with_503(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        await server.app.toolset.close()
        status, answer = await post(server, batch(SAY_HI))
        assert status == 503
        assert answer["faults"][0]["kind"] == "shutting_down"

    @pytest.mark.parametrize("options", [{"max_concurrent_requests": 0}, {"max_queued": -1}, {"max_body_bytes": 0}])
    def test_wrong_options_are_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            ToolServerApp(ToolSet([Puppet()]), **options)  # type: ignore[arg-type]


class TestReports:
    async def test_tools_are_described(self, servers: LiveServers) -> None:
        status, body, _ = await get(await servers.start([Puppet(), Ledger()]), "/tools")
        assert status == 200
        puppet, ledger = json.loads(body)["tools"]
        assert puppet["name"] == "puppet"
        assert puppet["parameters"]["type"] == "object"
        assert puppet["usage"]
        assert (puppet["stateful"], ledger["stateful"]) == (False, True)

    async def test_health_follows_the_tools(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        status, body, _ = await get(server, "/health")
        assert status == 200
        assert json.loads(body)["status"] == "healthy"
        assert (await get(server, "/-/healthz"))[:2] == (200, "success")
        puppet.sick = True
        assert (await get(server, "/-/healthz"))[0] == 503
        status, body, _ = await get(server, "/health")
        assert status == 503
        assert json.loads(body)["message"] == "the puppet is sick"

    async def test_metrics_count_what_happened_per_tool(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet(), Ledger()])
        await post(server, batch(SAY_HI, "<puppet>crash x</puppet>", "<ledger>a</ledger>", "nothing", steps=[0] * 4))
        _, body, headers = await get(server, "/metrics")
        assert headers["content-type"].startswith("text/plain")  # type: ignore[call-overload, index, union-attr]
        lines = set(body.splitlines())
        assert 'verl_tool_calls_total{tool="puppet"} 1.0' in lines
        assert 'verl_tool_calls_total{tool="ledger"} 1.0' in lines
        assert 'verl_tool_faults_total{kind="tool_crashed",tool="puppet"} 1.0' in lines
        assert 'verl_tool_invalid_calls_total{tool="none"} 1.0' in lines
        assert 'verl_tool_call_seconds_count{tool="ledger"} 1.0' in lines
        assert 'verl_tool_live_trajectories{tool="ledger"} 1.0' in lines
        assert 'verl_tool_queue_length{tool="puppet"} 0.0' in lines
        assert 'verl_tool_http_requests_total{route="/get_observation",status="200"} 1.0' in lines

    async def test_the_queue_length_is_told_per_tool(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet(), Ledger()], max_concurrent_requests=1)
        slow = asyncio.create_task(post(server, batch(*["<puppet>sleep 0.2</puppet>"] * 3)))
        await asyncio.sleep(0.15)
        _, body, _ = await get(server, "/metrics")
        assert 'verl_tool_queue_length{tool="puppet"} 2.0' in body
        assert 'verl_tool_queue_length{tool="ledger"} 0.0' in body
        await slow

    async def test_metric_labels_never_hold_a_callers_text(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        await get(server, "/some/secret/path")
        _, body, _ = await get(server, "/metrics")
        assert "secret" not in body
        assert 'route="other",status="404"' in body

    async def test_a_lone_server_lists_no_replicas(self, servers: LiveServers) -> None:
        _, body, headers = await get(await servers.start([Puppet()]), "/replicas")
        assert json.loads(body)["replicas"] == []
        assert headers["x-verl-tool-replica"] == "local"  # type: ignore[call-overload, index]


class _Elsewhere(Router):
    """A router that knows a peer, and answers for it."""

    def __init__(self) -> None:
        super().__init__("r1")
        self.asked: list[str] = []

    async def step(self, requests, run_local):  # type: ignore[no-untyped-def]
        self.asked += [request.trajectory_id for request in requests]
        return await run_local([StepRequest(r.trajectory_id, "<puppet>say routed</puppet>") for r in requests])


class TestRouting:
    async def test_the_router_decides_but_never_over_a_peers_request(self, servers: LiveServers) -> None:
        router = _Elsewhere()
        server = await servers.start([Puppet()], router=router, peer_key="key of the peers")
        _, answer = await post(server, batch(SAY_HI))
        assert text(answer["observations"][0]) == "routed"
        _, answer = await post(server, batch(SAY_HI), headers=FROM_A_PEER)
        assert text(answer["observations"][0]) == "hi"
        assert router.asked == ["t0"]

    async def test_a_peer_gets_faults_and_no_status(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()], peer_key="key of the peers")
        status, answer = await post(server, batch(3), headers=FROM_A_PEER)
        assert status == 200
        assert answer["faults"][0]["kind"] == "bad_request"

    @pytest.mark.parametrize("peer_key", [None, "key of the peers"])
    @pytest.mark.parametrize("path", ["/get_observation", "/health", "/metrics"])
    async def test_nobody_else_may_say_that_a_request_is_forwarded(
        self, servers: LiveServers, path: str, peer_key: str | None
    ) -> None:
        router = _Elsewhere()
        server = await servers.start([Puppet()], router=router, peer_key=peer_key)
        for headers in ({FORWARDED_HEADER: "1"}, {**FROM_A_PEER, PEER_KEY_HEADER: "another"}):
            if path == "/get_observation":
                status, answer = await post(server, batch(SAY_HI), headers=headers)
            else:
                status, body, _ = await get(server, path, headers=headers)
                answer = json.loads(body)
            assert status == 403
            assert answer["error"]["field"] == FORWARDED_HEADER


class TestRunCode:
    async def test_without_a_sandbox_it_says_what_to_start(self, servers: LiveServers) -> None:
        status, answer = await post(
            await servers.start([Puppet()]), {"code": "print(1)", "language": "python"}, "/run_code"
        )
        assert status == 404
        assert "--tool_type python_code" in answer["error"]["message"]
