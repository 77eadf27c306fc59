"""The peers of benchmarks/gateway.py, each served by a Python that has it, and the engine behind them.

    python benchmarks/gateway_peer.py {openenv,verifiers} URL_OF_THE_ENGINE PORT FOLDER_OF_THE_TOKENIZER

openenv's capture proxy tokenizes nothing: its engine renders and encodes the whole conversation at each turn and sends
the ids back. The engine here sends a quarter of the conversation's bytes as ids, at once.

verifiers intercepts as in a training run: its default pool of interception servers, and its ``TrainClient``, which
renders and encodes the new messages of a turn in this process and sends the ids of the whole prompt to vLLM's
``/inference/v1/generate``. The engine here sends the same turn back, at once. verifiers 0.4 answers a request from its
handler: no queue of requests is left that a loop could take them from.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

_SEPARATOR = 256
_ANSWER = list(range(300, 360))
_ARGUMENTS = '{"command": "sed -n 1,80p src/app.py"}'


def answer_request(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM would answer to a chat completion with ``return_token_ids``."""
    messages = body["messages"]
    prompt: list[int] = []
    for message in messages:
        prompt += _ANSWER if message["role"] == "assistant" else (message.get("content") or "").encode()[::4]
        prompt.append(_SEPARATOR)
    function = {"name": "bash", "arguments": _ARGUMENTS}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    message = {"role": "assistant", "content": "I read the next part of the file.", "tool_calls": [call]}
    entries = [{"token": f"token_id:{token}", "logprob": -0.1, "top_logprobs": []} for token in _ANSWER]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls",
        "token_ids": _ANSWER,
        "logprobs": {"content": entries},
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(_ANSWER), "total_tokens": len(prompt) + 60}
    head = {"id": f"chatcmpl-{len(messages)}", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": usage, "prompt_token_ids": prompt}


def engine_app(turn: list[int]) -> web.Application:
    """The engine. It generates `turn` for prompts of ids."""
    entries = [{"token": f"token_id:{token}", "logprob": -0.1} for token in turn]
    choice = {"index": 0, "token_ids": turn, "logprobs": {"content": entries}, "finish_reason": "stop"}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answer_request(await request.json()))

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"request_id": "r", "choices": [choice]})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/inference/v1/generate", generate)
    return app


def _serve_openenv(engine: str, port: int) -> None:
    import uvicorn
    from openenv.core.harness.capture.server import create_app

    app = create_app(llm_url=engine, model="m", capture_level="tokens")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


async def _serve_verifiers(engine: str, port: int, folder: str) -> None:
    import renderers.client  # noqa: F401  (TrainClient imports it at the first turn)
    from renderers import Qwen3RendererConfig
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.clients.train import ElasticRendererPool
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.interception import ElasticInterceptionPoolConfig, make_interception
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    client = TrainClientConfig(base_url=f"{engine}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=folder)
    # The process shares this renderer, whose loading is not a session's cost.
    await ElasticRendererPool(folder, client.renderer, multiplex=client.multiplex).grow()
    interception = make_interception(ElasticInterceptionPoolConfig(), requires_tunnel=False)
    async with interception, AsyncExitStack() as slots:

        async def open_session(_: web.Request) -> web.Response:
            task = TraceTask(type="Task", data=TaskData(prompt="Fix the failing test."))
            trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
            session = RolloutSession(ctx=ModelContext(model="m", client=client), trace=trace)
            url, secret, _state_secret = await slots.enter_async_context(interception.acquire(session))
            return web.json_response({"url": url, "session_id": secret})

        async def answer_health(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/sessions", open_session), web.get("/health", answer_health)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "openenv":
        _serve_openenv(sys.argv[2], int(sys.argv[3]))
    else:
        asyncio.run(_serve_verifiers(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
