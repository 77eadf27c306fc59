"""Who is asked on the way to the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, GlobalRequestLoadBalancer, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_tool.agent_loop.generators.single_engine import SoleEngineClient, direct_client

ROLLOUT = SimpleNamespace(full_determinism=False, name="vllm")
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT))


class Actor:
    """Stands for a Ray actor: its methods are called by `remote`, and the calls are counted."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda **kwargs: self._call(name, kwargs))

    def _call(self, name: str, kwargs: dict) -> asyncio.Future:
        if not name.startswith("require_"):  # what verl 0.9.1's balancer wants to be told, asked once
            self.calls[name] += 1
        future = asyncio.get_running_loop().create_future()
        future.set_result(getattr(self._inner, name)(**kwargs))
        return future


class Engine:
    def generate(self, prompt_ids: list[int], **_: object) -> TokenOutput:
        return TokenOutput(token_ids=[len(prompt_ids)], extra_fields={"global_steps": 3})


def set_up(engines: int) -> tuple[Actor, list[Actor], LLMServerClient]:
    servers = [Actor(Engine()) for _ in range(engines)]
    balancer = Actor(GlobalRequestLoadBalancer({str(i): server for i, server in enumerate(servers)}))
    return balancer, servers, LLMServerClient(CONFIG, balancer)


async def generate(client: LLMServerClient, turns: int) -> None:
    for turn in range(turns):
        output = await client.generate("a", prompt_ids=[1] * turn, sampling_params={})
        assert output.token_ids == [turn]
        assert output.extra_fields["min_global_steps"] == 3


async def test_the_balancer_of_one_engine_is_asked_once():
    balancer, (engine,), client = set_up(1)
    await generate(direct_client(client), 10)
    assert engine.calls == {"generate": 10}
    assert balancer.calls == {"get_all_servers": 1, "acquire_server": 1}


async def test_the_balancer_of_two_is_asked_every_time():
    balancer, servers, client = set_up(2)
    await generate(direct_client(client), 10)
    assert sum(server.calls["generate"] for server in servers) == 10
    assert balancer.calls == {"get_all_servers": 1, "acquire_server": 10, "release_server": 10}


async def test_many_at_once_find_the_same_engine():
    _, (engine,), client = set_up(1)
    sole = direct_client(client)
    await asyncio.gather(*[generate(sole, 3) for _ in range(20)])
    assert engine.calls == {"generate": 60}


def test_a_client_of_changing_engines_is_left_alone():
    client = FullyAsyncLLMServerClient(CONFIG, None)
    assert direct_client(client) is client
    assert isinstance(direct_client(LLMServerClient(CONFIG, None)), SoleEngineClient)
