"""Our tools as a NeMo-Gym resources server, over real HTTP, as the agents of nemo-gym 0.7 call it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from served_episodes import QUESTION, row_file, served
from toy_tools import Ledger, Puppet, until

from verl_tool.environments.served.nemo_gym import COOKIE, NemoGymApp, write_rows
from verl_tool.environments.served.task_rows import TaskRows
from verl_tool.errors import ConfigError
from verl_tool.http.host_check import HostCheck
from verl_tool.servers.tools import load_tools

DATA = Path(__file__).parent / "data"


class Agent:
    """One session, as NeMo-Gym's agents keep it: by the cookies of `/seed_session`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, row: dict[str, Any]) -> None:
        self.http, self.url, self.row = http, url, row
        self.cookies: dict[str, str] = {}

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        async with self.http.post(self.url + path, json=body, cookies=self.cookies) as response:
            self.cookies |= {name: morsel.value for name, morsel in response.cookies.items()}
            return response.status, await response.text()

    async def seed(self) -> None:
        assert await self.post("/seed_session", self.row) == (200, "{}")

    async def verify(self, *output: dict[str, Any]) -> dict[str, Any]:
        status, text = await self.post("/verify", {**self.row, "response": {"id": "r", "output": list(output)}})
        assert status == 200, text
        return json.loads(text)


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}


@asynccontextmanager
async def agents(
    servers: Any, folder: Path, *tools: Any, rows: Any = (QUESTION,), **options: Any
) -> AsyncIterator[Any]:
    """Yield a function that makes the agent of a row, and the episodes."""
    file = row_file(folder, *rows)
    async with served(servers, NemoGymApp, *tools, rows=file, **options) as (url, episodes):
        write_rows(TaskRows(file), await episodes.tools(), folder / "nemo.jsonl", "agent")
        written = [json.loads(line) for line in (folder / "nemo.jsonl").read_text().splitlines()]
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(cookie_jar=jar, headers={"authorization": "Bearer secret"}) as http:
            yield lambda row=0: Agent(http, url, written[row]), episodes


async def test_a_row_is_solved_and_its_answer_stays_here(servers, tmp_path):
    async with agents(servers, tmp_path, *load_tools("calculator")) as (agent, episodes):
        one = agent()
        params = one.row["responses_create_params"]
        assert params["input"] == QUESTION["prompt"]
        assert [(tool["type"], tool["name"], tool["strict"]) for tool in params["tools"]] == [
            ("function", "calculator", False)
        ]
        assert "42" not in json.dumps(one.row["verl_tool"]["row"])
        assert "ground_truth" not in json.dumps(one.row)
        await one.seed()
        assert await one.post("/calculator", {"expression": "6*7"}) == (200, "42")
        status, error = await one.post("/calculator", {"expression": "6*"})
        assert (status, "6*" in error or "expression" in error) == (422, True)
        assert (await one.post("/nope", {}))[0] == 404
        verdict = await one.verify(message("It is 42"))
        assert (verdict["reward"], verdict["mask_sample"], verdict["acc"]) == (1.0, False, 1.0)
        assert verdict["responses_create_params"] == params
        assert "ground_truth" not in verdict
        assert await one.verify(message("It is 17")) == {
            **verdict,
            "response": {"id": "r", "output": [message("It is 17")]},
        }
        assert len(episodes) == 0
        two = agent()
        await two.seed()
        assert (await two.verify(message("It is 42"), {"type": "function_call"}))["reward"] == 0.0, "it was cut"


async def test_sessions_keep_apart_and_are_freed(servers, tmp_path):
    ledger = Ledger()
    async with agents(servers, tmp_path, ledger) as (agent, _):
        one, two = agent(), agent()
        for each, entry in ((one, "bread"), (two, "milk"), (one, "tea")):
            if not each.cookies:
                await each.seed()
            status, listed = await each.post("/ledger", {"input": entry})
        assert (status, listed) == (200, "bread,tea")
        await one.verify(message("42"))
        await until(lambda: ledger.closed == [["bread", "tea"]])
        status, text = await one.post("/ledger", {"input": "late"})
        assert (status, "was closed" in text) == (410, True)


async def test_a_session_lost_by_a_restart_is_masked_and_not_started_again(servers, tmp_path):
    async with agents(servers, tmp_path, Ledger()) as (agent, _):
        lost = agent()
        await lost.seed()
        await lost.post("/ledger", {"input": "bread"})
    port = int(lost.url.rpartition(":")[2])
    async with agents(servers, tmp_path, Ledger(), port=port) as (agent, _):
        after = agent()
        after.cookies = lost.cookies
        status, text = await after.post("/ledger", {"input": "milk"})
        assert (status, "it restarted" in text) == (410, True)
        verdict = await after.verify(message("42"))
        assert (verdict["reward"], verdict["mask_sample"], verdict["failure_kind"]) == (0.0, True, "session_lost")


async def test_what_no_policy_can_cause_is_masked(servers, tmp_path):
    async with agents(servers, tmp_path, Puppet(), Ledger(), call_seconds=10.0) as (agent, _):
        one, two, three = agent(), agent(), agent()
        await one.seed()
        await two.seed()
        failed = await one.verify(message("break the grader"))
        assert (failed["mask_sample"], failed["failure_kind"]) == (True, "judge_failed")
        assert "broke" not in failed["failure_reason"], "it may quote the ground truth"
        assert (await two.post("/ledger", {"input": "bread"}))[0] == 200
        [tool_server] = servers._running
        await servers.stop()
        await servers.start([Ledger(), Puppet()], port=int(tool_server.url.rpartition(":")[2]))
        status, text = await two.post("/ledger", {"input": "milk"})
        assert (status, "state_lost" in text) == (410, True)
        masked = await two.verify(message("42"))
        assert (masked["mask_sample"], masked["failure_kind"]) == (True, "session_lost")
        await three.seed()
        status, text = await three.post("/puppet", {"input": "crash boom"})
        assert status == 422
        assert "has ended" in (await three.post("/puppet", {"input": "say hi"}))[1]
        blamed = await three.verify(message("42"))
        assert (blamed["mask_sample"], blamed["reward"]) == (False, 1.0), "its own call did it: graded as it stands"


async def test_media_in_an_output_are_left_out_and_the_session_goes_on(servers, tmp_path):
    async with agents(servers, tmp_path, Puppet(), Ledger()) as (agent, _):
        one = agent()
        await one.seed()
        status, text = await one.post("/puppet", {"input": "pictures 3 4"})
        assert (status, text.count("an image was left out")) == (200, 2)
        status, text = await one.post("/puppet", {"input": "sound"})
        assert (status, "a sound" in text, "audio was left out" in text) == (200, True, True)
        verdict = await one.verify(message("42"))
        assert (verdict["reward"], verdict["mask_sample"]) == (1.0, False)


async def test_what_is_wrong_with_a_request_is_named(servers, tmp_path):
    app_options = {"api_key": "secret", "host_check": HostCheck("127.0.0.1", None)}
    rows = (QUESTION, QUESTION)
    async with agents(servers, tmp_path, Ledger(), rows=rows, max_episodes=1, app_options=app_options) as (agent, _):
        one = agent()
        for path, body, status, words in (
            ("/ledger", {}, 400, "POST /seed_session first"),
            ("/seed_session", {}, 422, "nemo_gym_rows"),
            ("/seed_session", {"verl_tool": {"row": 0, "rows": "other"}}, 422, "make the rows anew"),
            ("/seed_session", {"resources_session_id": "a"}, 501, "not served"),
            ("/verify", {**one.row, "response": {}}, 422, "response.output"),
            ("/aggregate_metrics", {}, 422, "verify_responses"),
        ):
            assert (await one.post(path, body))[0] == status, path
            assert words in (await one.post(path, body))[1], path
        await one.seed()
        assert (await agent().post("/seed_session", one.row))[0] == 503
        status, text = await one.post("/verify", {**agent(1).row, "response": {"output": [message("42")]}})
        assert (status, "of row 0" in text) == (422, True)
        forged = agent()
        server, episode, _ = one.cookies[COOKIE].split(".")
        forged.cookies = {COOKIE: f"{server}.{episode}.{'0' * 64}"}
        assert (await forged.post("/ledger", {"input": "x"}))[0] == 403
        async with aiohttp.ClientSession() as stranger, stranger.post(f"{one.url}/seed_session", json={}) as response:
            assert response.status == 401


def test_rows_are_checked(tmp_path, servers):
    for row, words in (
        ({**QUESTION, "prompt": "What?"}, "must be a list of messages"),
        ({**QUESTION, "reward_model": None}, "must have a ground_truth"),
        ({**QUESTION, "images": ["a.png"]}, "images"),
    ):
        with pytest.raises(ConfigError, match=words):
            TaskRows(row_file(tmp_path, row))
    listed = {**QUESTION, "extra_info": {"tools_kwargs": {"tools": ["nope"]}}}
    with pytest.raises(ConfigError, match="does not serve"):
        write_rows(TaskRows(row_file(tmp_path, listed)), [], tmp_path / "out.jsonl", "agent")
