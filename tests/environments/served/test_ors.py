"""Our tools in the Open Reward Standard, over real HTTP, as openreward's client speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from served_episodes import QUESTION, row_file, served
from toy_tools import Ledger, Puppet, until

from verl_tool.environments.served.ors import OrsApp
from verl_tool.environments.served.submit import SUBMIT
from verl_tool.servers.tools import load_tools


class Session:
    """One session: its requests carry its id."""

    def __init__(self, http: aiohttp.ClientSession, url: str, sid: str) -> None:
        self.http, self.url, self.sid = http, url, sid

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"X-Session-ID": self.sid}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, **body: Any) -> list[tuple[str, str]]:
        async with self.http.post(f"{self.url}/call", json=body, headers={"X-Session-ID": self.sid}) as response:
            assert response.status == 200, await response.text()
            blocks = (await response.text()).split("\n\n")
        pairs = [block.partition("\ndata: ") for block in blocks if block.startswith("event: ")]
        return [(name.removeprefix("event: "), data) for name, _, data in pairs]

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        (first, _), (last, data) = await self.events(name=name, input=arguments)
        assert (first, last) == ("task_id", "end"), data
        return json.loads(data)


@asynccontextmanager
async def session(url: str, index: int = 0) -> AsyncIterator[Session]:
    async with aiohttp.ClientSession(headers={"X-API-Key": "secret"}) as http:
        async with http.post(f"{url}/create_session", json={}) as response:
            text = await response.text()
        one = Session(http, url, text.partition("data: ")[2].partition("\n")[0])
        status, created = await one.ask("POST", "/create", {"split": "train", "index": index})
        assert (status, created) == (200, {"sid": one.sid})
        yield one


async def test_a_row_is_played_to_its_reward(servers, tmp_path):
    rows, key = row_file(tmp_path, QUESTION), {"api_key": "secret"}
    tools = load_tools("calculator")
    async with served(servers, OrsApp, *tools, rows=rows, app_options=key) as (url, _), session(url) as one:
        tasks = await one.ask("POST", "/tasks", {"split": "train"})
        assert tasks[1] == {"tasks": [{"index": 0, "messages": QUESTION["prompt"]}], "env_name": "verl_tool"}
        assert (await one.ask("GET", "/verl_tool/prompt"))[1][0]["text"] == "What is 6*7?"
        assert (await one.ask("GET", "/messages"))[1][0]["role"] == "user"
        listed = (await one.ask("GET", "/task_tools"))[1]
        assert [tool["name"] for tool in listed["tools"]] == ["calculator"]
        assert listed["terminal_tool"]["name"] == SUBMIT
        answer = await one.call("calculator", expression="6*7")
        assert answer == {
            "ok": True,
            "output": {
                "blocks": [{"type": "text", "text": "42", "detail": None}],
                "metadata": None,
                "reward": None,
                "finished": False,
            },
        }
        assert (await one.call("nope"))["reason"] == "not_found"
        assert (await one.call(SUBMIT, answr="42"))["reason"] == "input_validation"
        end = (await one.call(SUBMIT, answer="It is 42"))["output"]
        assert (end["reward"], end["finished"]) == (1.0, True)
        assert await one.ask("POST", "/delete") == (200, {"sid": one.sid})
        assert (await one.ask("POST", "/ping"))[0] == 404
        one.http.headers["X-API-Key"] = "wrong"
        assert (await one.ask("GET", "/list_environments"))[0] == 401


async def test_a_call_whose_connection_broke_runs_once(servers, tmp_path):
    ledger = Ledger()
    async with served(servers, OrsApp, ledger, rows=row_file(tmp_path, QUESTION)) as (url, _), session(url) as one:
        call = {"name": "ledger", "input": {"input": "bread@1"}}
        response = await one.http.post(f"{url}/call", json=call, headers={"X-Session-ID": one.sid})
        first = (await response.content.readuntil(b"\n\n")).decode()
        response.close()
        task = first.partition("data: ")[2].strip()
        again = await one.events(**call, task_id=task)
        assert json.loads(again[-1][1])["output"]["blocks"][0]["text"] == "bread"
        assert (await one.call("ledger", input="milk"))["output"]["blocks"][0]["text"] == "bread,milk"
        async with session(url) as two:
            assert (await two.ask("POST", "/call", {**call, "task_id": task}))[0] == 410


async def test_what_is_lost_is_told(servers, tmp_path):
    rows = row_file(tmp_path, QUESTION)
    puppet = Puppet()
    async with served(servers, OrsApp, puppet, rows=rows, max_episodes=1) as (url, episodes), session(url) as one:
        refused = await one.ask("POST", "/create", {"split": "train", "index": 0})
        assert (refused[0], refused[1]["detail"]) == (400, "the session has begun already")
        other = Session(one.http, url, f"{episodes.name}.other")
        assert (await other.ask("POST", "/create", {"split": "train", "index": 0}))[0] == 503
        assert (await other.ask("POST", "/create", {"split": "test", "index": 0}))[0] == 400
        assert (await other.ask("POST", "/create", {"index": "a"}))[0] == 422
        running = asyncio.ensure_future(one.events(name="puppet", input={"input": "sleep 60"}))
        await until(lambda: puppet.runs == ["sleep 60"])
        await one.ask("POST", "/delete")
        assert (await running)[-1] == ("error", "the episode was closed")
        broken = await other.ask("POST", "/create", {"split": "train", "index": 0})
        assert broken[0] == 200
        assert (await other.events(name=SUBMIT, input={"answer": "break the grader"}))[-1][0] == "error"
    port = int(url.rpartition(":")[2])
    async with (
        served(servers, OrsApp, Puppet(), rows=rows, port=port) as (again, _),
        aiohttp.ClientSession() as http,
    ):
        lost = Session(http, again, one.sid)
        assert (await lost.ask("POST", "/ping"))[0] == 410
        assert (await lost.ask("POST", "/call", {"name": "puppet"}))[0] == 410
