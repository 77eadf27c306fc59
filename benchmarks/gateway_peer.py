"""The capture proxy of openenv, served for benchmarks/gateway.py by a Python that has it, and the engine behind it.

    python benchmarks/gateway_peer.py URL_OF_THE_ENGINE PORT

It tokenizes nothing: its engine renders and encodes the whole conversation at each turn and sends the ids back. The
engine here sends a quarter of the conversation's bytes as ids, at once.
"""

from __future__ import annotations

import sys
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


def engine_app() -> web.Application:
    """The engine."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answer_request(await request.json()))

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    return app


def _serve_capture(engine: str, port: int) -> None:
    import uvicorn
    from openenv.core.harness.capture.server import create_app

    app = create_app(llm_url=engine, model="m", capture_level="tokens")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    _serve_capture(sys.argv[1], int(sys.argv[2]))
