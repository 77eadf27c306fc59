"""The peers of benchmarks/environments_served.py, run by a Python that has openenv (and smolagents).

    python benchmarks/openenv_peer.py serve {echo,tool,python} PORT
    python benchmarks/openenv_peer.py play URL ACTION SESSIONS SECONDS

``echo`` returns its action, ``tool`` is an environment with one tool of fastmcp, and ``python`` runs code in openenv's
PyExecutor, an interpreter in its own process. ``play`` steps as many sessions as said with `GenericEnvClient`, in
episodes of 500 steps, and prints the steps to warm up, the seconds, and the durations of the steps in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

_MAX_SESSIONS = 64
_EPISODE_STEPS = 500
"""Below what an episode of ours may have; the next one begins then."""


class _TextAction(Action):
    text: str


class _TextObservation(Observation):
    text: str = ""


class _Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return _TextObservation()

    def step(self, action: _TextAction) -> Observation:  # type: ignore[override]
        return _TextObservation(text=action.text)

    @property
    def state(self) -> State:
        return State()


class _Python(_Echo):
    def __init__(self) -> None:
        from openenv.core.tools.local_python_executor import PyExecutor

        super().__init__()
        self._executor = PyExecutor()

    def step(self, action: _TextAction) -> Observation:  # type: ignore[override]
        return _TextObservation(text=self._executor.run(action.text).stdout)


class _Tool(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("peer")

        @server.tool
        def echo(text: str) -> str:
            return text

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError("call a tool")

    @property
    def state(self) -> State:
        return State()


def serve(kind: str, port: int) -> None:
    """Serve a peer until the process is ended."""
    made: Any = {
        "echo": (_Echo, _TextAction, _TextObservation),
        "python": (_Python, _TextAction, _TextObservation),
        "tool": (_Tool, CallToolAction, CallToolObservation),
    }[kind]
    app = create_fastapi_app(*made, max_concurrent_envs=_MAX_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


async def play(url: str, action: dict[str, Any], sessions: int, seconds: float) -> None:
    """Step all sessions for a while and print what came of it."""
    durations: list[float] = []
    warm_up = 0
    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]

    async def step(client: GenericEnvClient, until: float, counts: bool) -> None:
        nonlocal warm_up
        steps = _EPISODE_STEPS
        while time.perf_counter() < until:
            if steps == _EPISODE_STEPS:
                await client.reset()
                steps = 0
            steps += 1
            began = time.perf_counter()
            answer = await client.step(action)
            if answer.done:
                raise SystemExit(f"the episode ended at step {steps}: {answer.observation}")
            if counts:
                durations.append(1e3 * (time.perf_counter() - began))
            else:
                warm_up += 1

    for client in clients:
        await client.connect()
    await asyncio.gather(*(step(client, time.perf_counter() + 1.0, False) for client in clients))
    began = time.perf_counter()
    await asyncio.gather(*(step(client, began + seconds, True) for client in clients))
    passed = time.perf_counter() - began
    print(json.dumps({"warm_up": warm_up, "seconds": passed, "milliseconds": durations}))
    for client in clients:
        await client.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        asyncio.run(play(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
