"""Our tools as an OpenEnv environment, over real WebSocket and HTTP, as openenv 0.10's clients and servers speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from served_episodes import QUESTION, row_file, served
from toy_tools import Ledger, Puppet, until

from verl_tool.environments.served.openenv import OpenEnvApp
from verl_tool.environments.served.submit import SUBMIT
from verl_tool.http.host_check import HostCheck
from verl_tool.servers.tools import load_tools


class Socket:
    """A connection that sends one message and reads one."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def ask(self, kind: str, data: Any = None) -> dict[str, Any]:
        await self.socket.send_json({"type": kind} | ({} if data is None else {"data": data}))
        return json.loads(await self.socket.receive_str(timeout=20))

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        answer = await self.ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        assert answer["type"] == "observation", answer
        return answer["data"]


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Socket]:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws", **options) as socket:
        yield Socket(socket)


async def post(url: str, path: str, body: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        return await response.json()


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def text(data: dict[str, Any]) -> str:
    return data["observation"]["result"]["data"]


async def test_a_connection_plays_episodes_with_state(servers):
    ledger = Ledger()
    async with served(servers, OpenEnvApp, ledger, *load_tools("calculator")) as (url, _), connected(url) as socket:
        begun = await socket.ask("reset", {"episode_id": "mine"})
        assert begun == {
            "type": "observation",
            "data": {"observation": {"metadata": {}, "messages": []}, "reward": None, "done": False},
        }
        listed = (await socket.ask("step", {"type": "list_tools"}))["data"]["observation"]["tools"]
        assert {tool["name"] for tool in listed} == {ledger.name, "calculator"}
        assert set(listed[0]) == {"name", "description", "input_schema"}
        answer = await socket.call("calculator", expression="6*7")
        assert text(answer) == "42"
        assert (answer["reward"], answer["done"], answer["observation"]["error"]) == (None, False, None)
        assert (await socket.ask("state"))["data"] == {"episode_id": "mine", "step_count": 1}
        assert (await socket.ask("reset"))["type"] == "observation"
        assert (await socket.ask("state"))["data"]["step_count"] == 0
        await socket.socket.send_json({"type": "close"})
        assert (await socket.socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE


async def test_a_row_is_played_to_its_reward_and_its_answer_stays_here(servers, tmp_path):
    rows = row_file(tmp_path, QUESTION, {**QUESTION, "reward_model": {"style": "rule", "ground_truth": "17"}})
    async with (
        served(servers, OpenEnvApp, *load_tools("calculator,finish"), rows=rows) as (url, episodes),
        connected(url) as socket,
    ):
        seen = [await socket.ask("reset", {"index": 0})]
        assert seen[0]["data"]["observation"]["messages"] == QUESTION["prompt"]
        seen += [await socket.ask("step", {"type": "list_tools"})]
        assert SUBMIT in [tool["name"] for tool in seen[-1]["data"]["observation"]["tools"]]
        wrong = await socket.call(SUBMIT, answr="42")
        assert wrong["observation"]["error"]["error_type"] == "invalid_args"
        assert not wrong["done"]
        right = await socket.call(SUBMIT, answer="It is 42")
        assert (right["reward"], right["done"]) == (1.0, True)
        seen += [right, await socket.call(SUBMIT, answer="It is 17")]
        assert seen[-1]["reward"] == 1.0, "the first answer counts"
        late = await socket.call("calculator", expression="1")
        assert "has ended" in text(late)
        seen += [await socket.ask("reset", {"seed": 3}), await socket.call("finish", answer="17")]
        assert (seen[-1]["reward"], seen[-1]["done"]) == (1.0, True)
        seen += [await post(url, "/verl_tool/tasks", {"split": "train"})]
        assert [task["index"] for task in seen[-1]["tasks"]] == [0, 1]
        assert await post(url, "/verl_tool/num_tasks", {"split": "train"}) == {"num_tasks": 2}
        assert "ground_truth" not in json.dumps(seen)
        assert len(episodes) == 1


async def test_what_goes_wrong_is_told_as_the_protocol_has_it(servers, tmp_path):
    app_options = {"host_check": HostCheck("127.0.0.1", None), "api_key": "secret"}
    key = {"headers": {"authorization": "Bearer secret"}}
    async with served(
        *(servers, OpenEnvApp, Puppet()), rows=row_file(tmp_path, QUESTION), app_options=app_options, max_episodes=1
    ) as (url, _):
        for options, status in (({}, 401), ({"headers": {**key["headers"], "host": "evil.example"}}, 403)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with connected(url, **options):
                    pass
            assert refused.value.status == status
        async with connected(url, **key) as socket:
            error = await socket.ask("step", {"type": "call_tool", "tool_name": "puppet", "arguments": {}})
            assert (error["type"], error["data"]["code"]) == ("error", "EXECUTION_ERROR")
            assert "send reset" in error["data"]["message"]
            await socket.socket.send_str("{")
            assert json.loads(await socket.socket.receive_str())["data"]["code"] == "INVALID_JSON"
            for message, code in (
                (("nothing", {}), "UNKNOWN_TYPE"),
                (("reset", {"index": 0, "sed": 1}), "VALIDATION_ERROR"),
                (("reset", {"index": 7}), "EXECUTION_ERROR"),
                (("step", {"type": "call_tool"}), "VALIDATION_ERROR"),
                (("step", {"guess": 1}), "VALIDATION_ERROR"),
            ):
                assert (await socket.ask(*message))["data"]["code"] == code, message
            async with connected(url, **key) as second:
                refusal = json.loads(await second.socket.receive_str())["data"]
                assert (refusal["code"], refusal["active_sessions"]) == ("CAPACITY_REACHED", 1)
            await socket.ask("reset")
            assert text(await socket.call("puppet", input="say hi")) == "hi"
            assert (await socket.ask("reset", {"index": 7}))["data"]["code"] == "EXECUTION_ERROR"
            assert text(await socket.call("puppet", input="say it goes on")) == "it goes on"
            unknown = await socket.call("nope")
            assert unknown["observation"]["error"]["error_type"] == "tool_not_found"
            crashed = await socket.call("puppet", input="crash boom")
            assert crashed["observation"]["error"]["error_type"] == "execution_error"
            assert crashed["done"], "nobody knows what of the call still runs"
            await socket.ask("reset")
            lost = await socket.ask("step", {"type": "call_tool", "tool_name": SUBMIT, "arguments": _BREAK})
            assert lost["data"]["code"] == "SESSION_ERROR"
            assert "the grader failed for row 0" in lost["data"]["message"]
            assert "broke" not in lost["data"]["message"], "it may quote the ground truth"
            assert (await socket.socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE


_BREAK = {"answer": "break the grader"}


async def test_an_episode_ends_with_its_connection_and_with_the_state_of_its_tools(servers):
    ledger, puppet = Ledger(), Puppet()
    async with served(servers, OpenEnvApp, ledger, puppet, idle_seconds=2.0) as (url, episodes):
        async with connected(url) as socket:
            await socket.ask("reset")
            await socket.call("ledger", input="bread")
            assert text(await socket.call("ledger", input="milk")) == "bread,milk"
        await until(lambda: ledger.closed == [["bread", "milk"]])
        async with connected(url) as socket:
            await socket.ask("reset")
            running = {"type": "call_tool", "tool_name": "puppet", "arguments": {"input": "sleep 60"}}
            await socket.socket.send_json({"type": "step", "data": running})
            await until(lambda: puppet.runs == ["sleep 60"])
        await until(lambda: len(episodes) == 0)
        async with connected(url) as socket:
            await socket.ask("reset")
            assert json.loads(await socket.socket.receive_str(timeout=10))["data"]["code"] == "SESSION_ERROR"
        assert puppet.ended == []


async def test_mcp_tools_over_http_share_the_session_of_a_connection(servers, tmp_path):
    ledger = Ledger()
    async with served(servers, OpenEnvApp, ledger, rows=row_file(tmp_path, QUESTION)) as (url, _):
        created = await post(url, "/mcp", rpc("openenv/session/create"))
        session = created["result"]["session_id"]
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{url}/ws?session_id={session}") as raw,
        ):
            socket = Socket(raw)
            await socket.ask("reset")
            listed = await post(url, "/mcp", rpc("tools/list", session_id=session))
            assert {tool["name"] for tool in listed["result"]["tools"]} == {"ledger", SUBMIT}
            call = {"name": "ledger", "session_id": session}
            first = await post(url, "/mcp", rpc("tools/call", arguments={"input": "bread"}, **call))
            assert first["result"]["data"] == "bread"
            assert text(await socket.call("ledger", input="milk")) == "bread,milk"
            over_ws = await socket.ask("mcp", rpc("tools/call", name="ledger", arguments={"input": "tea"}))
            assert over_ws["data"]["result"]["data"] == "bread,milk,tea"
            own = await socket.ask("mcp", rpc("openenv/session/close", session_id=session))
            assert "this connection's" in own["data"]["error"]["message"]
        ended = await post(url, "/mcp", rpc("tools/call", name=SUBMIT, arguments={"answer": "42"}, session_id=session))
        assert ended["result"]["meta"] == {"reward": 1.0, "done": True}
        assert (await post(url, "/mcp", rpc("openenv/session/close", session_id=session)))["result"]["closed"]
        for method, code in (("tools/call", -32602), ("nope", -32601)):
            params = {} if method == "nope" else {"session_id": session}
            assert (await post(url, "/mcp", rpc(method, name="ledger", **params)))["error"]["code"] == code
        assert (await post(url, "/mcp", {"method": 3}))["error"]["code"] == -32600


async def test_a_session_that_is_closed_during_its_connection_ends_with_it(servers):
    ledger = Ledger()
    async with served(servers, OpenEnvApp, ledger) as (url, _):
        session = (await post(url, "/mcp", rpc("openenv/session/create")))["result"]["session_id"]
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws?session_id={session}") as raw:
            await Socket(raw).ask("reset")
            await Socket(raw).call("ledger", input="bread")
            closed = await post(url, "/mcp", rpc("openenv/session/close", session_id=session))
            assert closed["result"]["closing"] is True
            assert text(await Socket(raw).call("ledger", input="milk")) == "bread,milk"
        await until(lambda: ledger.closed == [["bread", "milk"]])


async def test_a_session_of_before_a_restart_is_not_taken_for_a_new_one(servers):
    async with served(servers, OpenEnvApp, Ledger()) as (url, _):
        session = (await post(url, "/mcp", rpc("openenv/session/create")))["result"]["session_id"]
    async with served(servers, OpenEnvApp, Ledger(), port=int(url.rpartition(":")[2])) as (again, _):
        lost = await post(again, "/mcp", rpc("tools/call", name="ledger", arguments={}, session_id=session))
        assert "Its state is lost" in lost["error"]["message"]
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{again}/ws?session_id={session}") as socket:
            assert json.loads(await socket.receive_str())["data"]["code"] == "SESSION_ERROR"


async def test_a_tool_server_that_lost_the_state_ends_the_session(servers):
    async with served(servers, OpenEnvApp, Ledger(), call_seconds=10.0) as (url, _), connected(url) as socket:
        await socket.ask("reset")
        await socket.call("ledger", input="bread")
        [tool_server] = servers._running
        port = int(tool_server.url.rpartition(":")[2])
        await servers.stop()
        await servers.start([Ledger()], port=port)
        call = {"type": "call_tool", "tool_name": "ledger", "arguments": {"input": "milk"}}
        lost = await socket.ask("step", call)
        assert (lost["type"], lost["data"]["code"]) == ("error", "SESSION_ERROR"), lost
        assert "state_lost" in lost["data"]["message"]


async def test_pages_describe_it(servers):
    async with served(servers, OpenEnvApp, *load_tools("calculator")) as (url, _), aiohttp.ClientSession() as http:
        pages = {}
        for path in ("/health", "/metadata", "/schema", "/list_environments", "/metrics"):
            async with http.get(url + path) as response:
                assert response.status == 200, path
                pages[path] = await response.text()
        assert json.loads(pages["/health"]) == {"status": "healthy"}
        assert "calculator" in json.loads(pages["/metadata"])["description"]
        assert set(json.loads(pages["/schema"])) == {"action", "observation", "reset_observation", "state"}
        assert "verl_tool_sessions 0.0" in pages["/metrics"]
        async with http.post(f"{url}/reset", json={}) as response:
            assert response.status == 501
        async with http.get(f"{url}/other/splits") as response:
            assert response.status == 404


async def test_many_sessions_keep_apart(servers):
    async with served(servers, OpenEnvApp, Ledger()) as (url, _):

        async def play(number: int) -> list[str]:
            async with connected(url) as socket:
                await socket.ask("reset")
                return [text(await socket.call("ledger", input=f"{number}-{i}")) for i in range(5)]

        played = await asyncio.gather(*(play(number) for number in range(16)))
        assert [answers[-1] for answers in played] == [",".join(f"{n}-{i}" for i in range(5)) for n in range(16)]


async def test_odd_messages_do_not_harm_other_sessions(servers):
    call = {"type": "call_tool", "tool_name": "ledger"}
    async with served(servers, OpenEnvApp, Ledger()) as (url, episodes), connected(url) as well:
        await well.ask("reset")
        async with connected(url) as odd:
            await odd.ask("reset")
            for message in (
                b"\xff\xfe",
                b"[" * 5000,
                b"[1]",
                b'"text"',
                b'{"type": ["step"]}',
                b'{"type": "step", "data": 3}',
                b'{"type": "reset", "data": {"index": 1e400}}',
                b'{"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": {}}}}',
                b'{"type": "mcp", "data": {"jsonrpc": "2.0", "id": {}, "method": "tools/list"}}',
            ):
                await odd.socket.send_bytes(message)
                answer = json.loads(await odd.socket.receive_str(timeout=20))
                assert answer["type"] == "error" or "error" in answer["data"], message
            surrogate = json.dumps({"type": "step", "data": {**call, "arguments": {"input": "\ud800"}}})
            await odd.socket.send_str(surrogate)
            assert json.loads(await odd.socket.receive_str())["data"]["observation"]["result"]["data"] == "\ufffd"
            # Two messages at once are answered one after the other.
            for entry in ("a", "b"):
                await odd.socket.send_json({"type": "step", "data": {**call, "arguments": {"input": entry}}})
            both = [json.loads(await odd.socket.receive_str())["data"] for _ in range(2)]
            assert [text(data) for data in both] == ["\ufffd,a", "\ufffd,a,b"]
            await odd.socket.send_str("x" * (2 << 20))
            assert (await odd.socket.receive(timeout=20)).data == 1009, "a message that is too large"
        await until(lambda: len(episodes) == 1)
        assert text(await well.call("ledger", input="bread")) == "bread"


async def test_the_deadline_of_a_request_s_head_is_none_of_a_connection(servers, monkeypatch):
    monkeypatch.setattr("verl_tool.http.http_protocol.HEAD_SECONDS", 0.2)
    async with served(servers, OpenEnvApp, Ledger()) as (url, _), connected(url) as socket:
        await socket.ask("reset")
        await asyncio.sleep(0.6)
        assert text(await socket.call("ledger", input="bread")) == "bread"
