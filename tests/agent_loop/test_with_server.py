"""The loop over HTTP: the real client, the real server, real tools; and the server failing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from toy_model import Characters, ScriptedEngine, ToyTokenizer

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import Excluded, StopReason, Trajectory
from verl_tool.client import ToolClient
from verl_tool.notebook.text_environment import TextEnvironment
from verl_tool.protocol import FaultKind
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.asgi_app import ToolServerApp
from verl_tool.servers.tools import load_tools

COUNTER = Path(__file__).parents[1] / "servers/data/counter.py"
COUNT, FINISH = "<counter></counter>", "<finish>42</finish>"


class Flaky:
    """Turns the first requests for observations away, as a full server does."""

    def __init__(self, app: Any, refusals: int) -> None:
        self.app, self.refusals, self.requests = app, refusals, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/get_observation":
            self.requests += 1
            if self.requests <= self.refusals:
                headers = [(b"retry-after", b"0"), (b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 503, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
                return
        await self.app(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(toolset: ToolSet, refusals: int = 0) -> AsyncIterator[str]:
    await toolset.start()
    listener = socket.create_server(("127.0.0.1", 0))
    app = Flaky(ToolServerApp(toolset), refusals)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/get_observation"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
        await toolset.close()


async def run(url: str, turns: list[str], **options: Any) -> Trajectory:
    tokenizer = ToyTokenizer()
    settings = EpisodeOptions.load(
        {"action_stop_tokens": ["</counter>", "</finish>"], "tool_call_retry_delay": 0.01, **options}
    )
    async with ToolClient(url, **settings.client_settings()) as client:
        episode = Episode(ScriptedEngine(tokenizer, turns), client, tokenizer, settings)
        return await episode.run(tokenizer.encode("count"), trajectory_id="t")


async def test_a_stateful_tool_counts_the_turns_and_is_freed_at_the_end() -> None:
    toolset = ToolSet(load_tools(str(COUNTER)))
    async with serving(toolset) as url:
        trajectory = await run(url, [COUNT, COUNT, "two"])
        assert [call.observation for call in trajectory.calls] == [
            "\n<result>\n1\n</result>\n",
            "\n<result>\n2\n</result>\n",
        ]
        assert trajectory.stop is StopReason.ANSWERED
        assert toolset.unfinished() == 0


async def test_the_finish_tool_ends_the_trajectory() -> None:
    async with serving(ToolSet(load_tools(f"{COUNTER},finish"))) as url:
        trajectory = await run(url, [COUNT, FINISH])
        assert trajectory.stop is StopReason.TOOL_DONE
        assert trajectory.calls[1].done


async def test_a_full_server_is_asked_again_as_often_as_allowed() -> None:
    async with serving(ToolSet(load_tools(str(COUNTER))), refusals=2) as url:
        trajectory = await run(url, [COUNT, "one"], tool_call_max_retries=2)
        assert trajectory.stop is StopReason.ANSWERED
        assert "1" in trajectory.calls[0].observation


async def test_without_retries_a_full_server_is_a_fault() -> None:
    async with serving(ToolSet(load_tools(str(COUNTER))), refusals=1) as url:
        trajectory = await run(url, [COUNT], tool_call_max_retries=0)
        assert trajectory.fault is not None
        assert trajectory.fault.kind is FaultKind.OVERLOADED
        assert trajectory.excluded is Excluded.FAULT


async def test_a_call_that_takes_too_long_is_a_fault_at_its_deadline() -> None:
    async with serving(ToolSet(load_tools(str(COUNTER)))) as url:
        slow = "<counter>2</counter>"
        trajectory = await asyncio.wait_for(run(url, [slow], tool_call_timeout=0.3, tool_call_max_retries=0), 10)
        assert trajectory.fault is not None
        assert trajectory.fault.kind is FaultKind.TIMEOUT
        assert trajectory.calls[0].seconds < 2


@pytest.fixture
def calculator_url() -> Iterator[str]:
    """A server in a thread of its own, for callers that have no event loop."""
    started, url, stop = threading.Event(), [], []

    async def serve() -> None:
        done = asyncio.Event()
        stop.append((asyncio.get_running_loop(), done))
        async with serving(ToolSet(load_tools("calculator,finish"))) as address:
            url.append(address)
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(20)
    yield url[0]
    loop, done = stop[0]
    loop.call_soon_threadsafe(done.set)
    thread.join(20)


def test_a_notebook_may_use_a_server(calculator_url: str) -> None:
    class Solver:
        async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
            task, _, rest = "".join(map(chr, prompt_ids)).partition("=")
            call = f"<request><SimpleCalculatorTool>{task}<call>"
            answer = rest.removesuffix("<response>").rpartition("<call>")[2]
            return Generation([ord(c) for c in (f"Result={answer}<submit>" if rest else call)])

    tokenizer = Characters()
    env = TextEnvironment(
        Solver(), tokenizer, calculator_url, lambda segments: [float(s == "Result=10.1<submit>") for s in segments]
    )
    assert "<request><SimpleCalculatorTool>13.1-3<call>" in env.usage()
    _, responses, _, rewards, (history,) = env.run(["13.1-3="])
    assert "".join(map(chr, responses[0])) == (
        "<request><SimpleCalculatorTool>13.1-3<call>10.1<response>Result=10.1<submit>"
    )
    assert rewards == [1.0]
    assert history.trajectory.stop is StopReason.TOOL_DONE


def test_a_notebook_may_use_the_tags_of_a_server_s_tools(calculator_url: str) -> None:
    class Solver:
        async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
            asked = "</calculator>" in "".join(map(chr, prompt_ids))
            return Generation([ord(c) for c in ("<finish/>" if asked else "<calculator>6*7</calculator>")])

    env = TextEnvironment(Solver(), Characters(), calculator_url, formats="tags", max_turns=2)
    assert "\n<calculator>13.1-3</calculator>\n" in env.usage()
    _, responses, *_ = env.run(["6*7="])
    assert "".join(map(chr, responses[0])).startswith("<calculator>6*7</calculator>\n<result>\n42\n</result>\n")
