"""The load generator of the tool server's benchmark, against a real server of HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web
from local_server import serve
from script_module import load_script

BENCHMARK = Path(__file__).parents[2] / "benchmarks/served_tools.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARK.parent), *sys.path])
    return load_script("served_tools_benchmark", BENCHMARK)


@asynccontextmanager
async def echo(seen: list[str]) -> AsyncIterator[str]:
    """A server that answers each action with itself; an action `fail` with 500, and `bye` ends the connection."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(request.transport.get_extra_info("peername")[1] if request.transport else 0)
        if body["actions"] == ["fail"]:
            return web.Response(status=500, text="it is broken")
        response = web.json_response({"observations": body["actions"]})
        if body["actions"] == ["bye"]:
            response.force_close()
        return response

    async with serve(web.post("/get_observation", answer)) as url:
        yield url


async def test_each_answer_is_its_own_and_connections_are_used_again(benchmark: ModuleType) -> None:
    ports: list[str] = []
    async with echo(ports) as url, benchmark.Connections(url) as connections:
        for _ in range(3):
            answers = await asyncio.gather(*(connections.get_observation([f"t{n}"], [f"<é{n}>"]) for n in range(4)))
            assert answers == [[f"<é{n}>"] for n in range(4)]
    assert len(ports) == 12
    assert len(set(ports)) == 4


async def test_an_error_is_told_and_costs_nothing_else(benchmark: ModuleType) -> None:
    async with echo([]) as url, benchmark.Connections(url) as connections:
        with pytest.raises(RuntimeError, match=r"500.*it is broken"):
            await connections.get_observation(["t"], ["fail"])
        assert await connections.get_observation(["t"], ["bye"]) == ["bye"]
        await asyncio.sleep(0.1)
        assert await connections.get_observation(["t"], ["again"]) == ["again"]
