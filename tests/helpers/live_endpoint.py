"""The service in the process of the test, over a scripted engine and a real tool server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live_server import LiveServer, LiveServers, serve_asgi
from scripted_engine import Rule, RuleEngine, plain_tokenizer
from toy_images import ToyImageTokens, image_tokenizer

from eval_service.openai.endpoint import Endpoint
from eval_service.openai.image_reader import ImageReader
from eval_service.service import Service
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.client import ToolClient
from verl_tool.servers.tools import Tool, load_tools

MODEL = "toy"
CALL = "<request><SimpleCalculatorTool>13.1-3<call>"
COUNTER = str(Path(__file__).parents[1] / "servers/data/counter.py")
STOP_SECONDS = 20.0


def calculates(text: str) -> str:
    """Follow the rule of a model that calls the calculator once and then reports the result."""
    _, asked, answer = text.rpartition(CALL)
    if not asked:
        return CALL
    return f"Result={answer.split('<response>')[0].strip()}"


@dataclass
class LiveEndpoint:
    """One endpoint that answers at `url`."""

    url: str
    engine: RuleEngine
    endpoint: Endpoint
    tool_server: LiveServer
    clients: list[Any] = field(default_factory=list)
    """OpenAI clients to close at the end."""


@asynccontextmanager
async def live_endpoint(
    rule: Rule = calculates,
    *,
    pause: float = 0.0,
    options: dict[str, Any] | None = None,
    max_queued: int = 1024,
    tools: str | Sequence[Tool] = "calculator",
    max_model_len: int = 4096,
    image_reader: ImageReader | None = None,
    **endpoint_options: Any,
) -> AsyncIterator[LiveEndpoint]:
    """Run an endpoint. With an `image_reader`, its model reads images."""
    servers = LiveServers()
    tool_server = await servers.start(load_tools(tools) if isinstance(tools, str) else tools)
    # The engine's rule looks for a call, and an example of one in the prompt would be taken for its own.
    usual = {"action_stop_tokens": ["<call>"], "max_obs_length": 100, "tool_schemas": "none"}
    chosen: dict[str, Any] = usual | (options or {})
    loop_options = EpisodeOptions.load(chosen | {"tool_server_url": tool_server.url})
    looks = image_reader is not None
    tokenizer = image_tokenizer() if looks else plain_tokenizer()
    engine = RuleEngine(tokenizer, rule, pause=pause, max_model_len=max_model_len)
    async with ToolClient(tool_server.url, timeout=10, retry_delay=0.01, max_retries=1) as client:
        service = Service(
            *(engine, tokenizer, client, loop_options),
            max_queued=max_queued,
            image_tokens=ToyImageTokens(tokenizer) if looks else None,
            image_reader=image_reader,
        )
        endpoint = Endpoint(service, MODEL, **endpoint_options)
        url, server, task = await serve_asgi(endpoint)
        live = LiveEndpoint(url, engine, endpoint, tool_server)
        try:
            yield live
        finally:
            for client in live.clients:
                await client.close()
            server.should_exit = True
            await asyncio.wait_for(task, STOP_SECONDS)
            await service.aclose()
            await servers.stop()
