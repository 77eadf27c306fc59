"""Requests to an engine that the trainer takes for itself."""

from __future__ import annotations

import asyncio
import itertools
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer
from verl.workers.rollout.replica import TokenOutput

from verl_tool.agent_loop.generators import removed_engine
from verl_tool.agent_loop.generators.removed_engine import ChangingEnginesClient

pytestmark = pytest.mark.skipif(version("verl") != "0.9.0", reason="engines of later versions reject such requests")

ROLLOUT = SimpleNamespace(full_determinism=False, name="vllm", response_length=8)
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT))
ANSWER = [7, 8]
CHECK_SECONDS = 0.05


class Actor:
    """Stands for a Ray actor: its methods are called by `remote`."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        async def call(**kwargs: Any) -> Any:
            made = getattr(self._inner, name)(**kwargs)
            return await made if asyncio.iscoroutine(made) else made

        return SimpleNamespace(remote=lambda **kwargs: asyncio.ensure_future(call(**kwargs)))


class Engine:
    """Answers while it samples. As vLLM's, it keeps a request that comes while it is paused."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.samples = asyncio.Event()
        self.samples.set()
        self.prompts: list[list[int]] = []
        self.reached = asyncio.Event()

    async def generate(self, prompt_ids: list[int], **_: object) -> TokenOutput:
        self.prompts.append(prompt_ids)
        self.reached.set()
        await self.samples.wait()
        fields = {"global_steps": 3}
        return TokenOutput(token_ids=self._tokens, log_probs=[0.0] * len(self._tokens), extra_fields=fields)


class Pool:
    """Two engines, of which the first is asked first, and their client."""

    def __init__(self) -> None:
        self.trainers, self.separate = Engine([1]), Engine(ANSWER)
        self.balancer = GlobalRequestLoadBalancer({"trainer": Actor(self.trainers), "separate": Actor(self.separate)})
        self.client = ChangingEnginesClient(CONFIG, Actor(self.balancer))

    def generate(self) -> asyncio.Task[TokenOutput]:
        async def generate() -> TokenOutput:
            made: TokenOutput = await self.client.generate("a", prompt_ids=[5], sampling_params={})
            return made

        return asyncio.create_task(generate())

    def pause(self) -> None:
        self.trainers.samples.clear()


@pytest.fixture(autouse=True)
def checks_often(monkeypatch):
    monkeypatch.setattr(removed_engine, "CHECK_SECONDS", CHECK_SECONDS)


async def test_a_request_that_comes_after_the_abort_is_answered_by_another_engine():
    pool = Pool()
    pool.pause()
    request = pool.generate()
    await pool.trainers.reached.wait()
    pool.balancer.remove_servers(["trainer"])
    output = await asyncio.wait_for(request, 20)
    assert (output.token_ids, output.log_probs) == (ANSWER, [0.0, 0.0])
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 3
    assert pool.separate.prompts == [[5]]


async def test_a_request_to_a_paused_engine_of_the_pool_waits_for_it():
    pool = Pool()
    pool.pause()
    request = pool.generate()
    await asyncio.sleep(5 * CHECK_SECONDS)
    assert not request.done()
    pool.trainers.samples.set()
    assert (await asyncio.wait_for(request, 20)).token_ids == [1]
    assert pool.separate.prompts == []


async def test_an_engine_that_is_missing_in_one_check_is_not_left(monkeypatch):
    """It is missing in every other check."""
    pool = Pool()
    pool.pause()
    checks = itertools.count()

    def servers() -> list[str]:
        check = next(checks)
        if check == 6:
            pool.trainers.samples.set()
        return ["separate", *["trainer"] * (check % 2)]

    monkeypatch.setattr(pool.balancer, "get_all_servers", servers)
    assert (await asyncio.wait_for(pool.generate(), 20)).token_ids == [1]
    assert pool.separate.prompts == []


async def test_what_the_engine_answers_when_it_is_removed_counts():
    pool = Pool()
    pool.pause()
    request = pool.generate()
    await pool.trainers.reached.wait()
    pool.balancer.remove_servers(["trainer"])
    pool.trainers.samples.set()
    assert (await asyncio.wait_for(request, 20)).token_ids == [1]
    assert pool.separate.prompts == []


async def test_a_cancelled_request_leaves_nothing_running():
    pool = Pool()
    pool.pause()
    request = pool.generate()
    await pool.trainers.reached.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.sleep(CHECK_SECONDS)
    assert asyncio.all_tasks() == {asyncio.current_task()}
