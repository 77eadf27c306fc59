"""What the clients of openenv 0.10.0, nemo-gym 0.7.0 and openreward 0.1.167 sent us gets the same answers again.

``data/*.json`` were recorded while the programs of the live tests ran on the tool calculator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from served_episodes import QUESTION, row_file, served

from verl_tool.environments.served.nemo_gym import NemoGymApp
from verl_tool.environments.served.openenv import OpenEnvApp
from verl_tool.environments.served.ors import OrsApp
from verl_tool.servers.tools import load_tools

DATA = Path(__file__).with_name("data")
_IDS = re.compile(r"\b[0-9a-f]{16,64}\b")


class Replay:
    """Sends a recording. Ids are new in each run: those of the answers take the place of the recorded ones."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url
        self.ids: dict[str, str] = {}
        self.sockets: dict[int, aiohttp.ClientWebSocketResponse] = {}

    async def run(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            await (self.exchange(entry) if "method" in entry else self.on_socket(entry))

    async def exchange(self, entry: dict[str, Any]) -> None:
        headers, body = self.current(entry["headers"]), self.current(entry["body"])
        path = self.url + self.current(entry["path"])
        async with self.http.request(entry["method"], path, json=body, headers=headers) as response:
            text = await response.text()
            answer = text if isinstance(entry["answer"], str) else json.loads(text)
            self.learn(entry.get("set_cookie", ""), response.headers.get("set-cookie", "").partition(";")[0])
            self.check(entry["path"], entry["answer"], answer)
            assert response.status == entry["status"], entry["path"]

    async def on_socket(self, entry: dict[str, Any]) -> None:
        number = entry["connection"]
        if "open" in entry:
            self.sockets[number] = await self.http.ws_connect(self.url + self.current(entry["open"]))
        elif "send" in entry:
            await self.sockets[number].send_json(self.current(entry["send"]))
        elif "recv" in entry:
            self.check("/ws", entry["recv"], json.loads(await self.sockets[number].receive_str(timeout=20)))
        else:
            await self.sockets[number].close()

    def check(self, where: str, recorded: Any, answer: Any) -> None:
        self.learn(json.dumps(recorded), json.dumps(answer))
        assert answer == self.current(recorded), where

    def learn(self, recorded: str, answer: str) -> None:
        self.ids.update(zip(_IDS.findall(recorded), _IDS.findall(answer), strict=True))

    def current(self, value: Any) -> Any:
        text = _IDS.sub(lambda found: self.ids.get(found[0], found[0]), json.dumps(value))
        return json.loads(text)


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(item)


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [("openenv", OpenEnvApp, {}), ("nemo_gym", NemoGymApp, {}), ("ors", OrsApp, {"api_key": "secret"})],
)
async def test_it_answers_as_recorded(servers, tmp_path, name, make, options):
    entries = json.loads((DATA / f"{name}.json").read_text())
    assert "ground_truth" not in set(keys(entries))
    rows = row_file(tmp_path, QUESTION)
    async with (
        served(servers, make, *load_tools("calculator"), rows=rows, app_options=options) as (url, _),
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
    ):
        await Replay(http, url).run(entries)
