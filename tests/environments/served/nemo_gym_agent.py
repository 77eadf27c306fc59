"""Run by the Python of nemo-gym 0.7: its simple_agent runs the rows of standard input on our resources server.

Arguments: the server's port, the policy's turns as JSON (each an output item of the Responses API, or a list of them),
and rows as JSON lines. The policy repeats its turns for each row. Prints what the agent answered, a line for each row.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

PORT, TURNS, ROWS = int(sys.argv[1]), json.loads(sys.argv[2]), [json.loads(line) for line in sys.argv[3].splitlines()]


def policy() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/responses")
    async def respond(request: Request) -> dict[str, Any]:
        body = await request.json()
        done = sum(item.get("type") == "function_call_output" for item in body["input"])
        output = TURNS[min(done, len(TURNS) - 1)]
        fixed = {"id": "r", "created_at": 0, "model": "m", "object": "response", "tool_choice": "auto"}
        return {**fixed, "output": [output], "parallel_tool_calls": True, "tools": body.get("tools", [])}

    return app


async def serve(app: FastAPI, port: int) -> uvicorn.Server:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    asyncio.ensure_future(server.serve())  # noqa: RUF006
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def answer_of(response: aiohttp.ClientResponse) -> Any:
    text = await response.text()
    return json.loads(text) if response.status == 200 else text


async def main() -> None:
    model, agent = free_port(), free_port()

    def at(kind: str, port: int) -> dict[str, Any]:
        return {kind: {"one": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}

    config = {
        "ours": at("resources_servers", PORT),
        "policy": at("responses_api_models", model),
        "agent": at("responses_api_agents", agent),
    }
    # As NeMo-Gym's launcher gives it to its servers; else they would read this script's command line for it.
    os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(config)
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(config)
    )
    settings = SimpleAgentConfig(
        name="agent",
        entrypoint="app.py",
        host="127.0.0.1",
        port=agent,
        max_steps=6,
        resources_server={"type": "resources_servers", "name": "ours"},
        model_server={"type": "responses_api_models", "name": "policy"},
    )
    simple = SimpleAgent(config=settings, server_client=client)
    servers = [await serve(policy(), model), await serve(simple.setup_webserver(), agent)]
    async with aiohttp.ClientSession() as http:
        for row in ROWS:
            async with http.post(f"http://127.0.0.1:{agent}/run", json=row) as response:
                print(json.dumps({"status": response.status, "answer": await answer_of(response)}))
        responses = [{"_ng_task_index": 0, "reward": 1.0}, {"_ng_task_index": 0, "reward": 0.0, "mask_sample": True}]
        async with http.post(
            f"http://127.0.0.1:{agent}/aggregate_metrics", json={"verify_responses": responses}
        ) as response:
            print(json.dumps({"status": response.status, "answer": await answer_of(response)}))
    for server in servers:
        server.should_exit = True


asyncio.run(main())
