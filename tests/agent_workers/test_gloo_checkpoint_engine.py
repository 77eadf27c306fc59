"""Weights from a trainer to two processes that sample, over gloo: each a thread with an engine of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from verl.checkpoint_engine.base import CheckpointEngineRegistry  # noqa: E402

from verl_tool.agent_workers import gloo_checkpoint_engine  # noqa: E402

WEIGHTS = {
    "embed": torch.arange(12.0).reshape(3, 4),
    "turned": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "scale": torch.tensor(3.0),
    "none": torch.zeros(0),
}


def exchange(trainers: list, samplers: list) -> list[dict]:
    """One update, as verl's manager drives it; what each sampler received."""
    metadata = [engine.prepare() for engine in [*trainers, *samplers]]
    arguments = type(trainers[0]).build_topology(len(trainers), len(samplers), metadata)

    async def receive(engine) -> dict:
        return {name: tensor.clone() async for name, tensor in engine.receive_weights()}

    def take_part(engine, group, place, weights):
        engine.init_process_group(**{name: values[place] for name, values in group.items()})
        done = asyncio.run(receive(engine) if weights is None else engine.send_weights(iter(weights.items())))
        engine.finalize()
        return done

    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(take_part, engine, arguments[0], i, WEIGHTS) for i, engine in enumerate(trainers)]
        received = [pool.submit(take_part, engine, arguments[1], i, None) for i, engine in enumerate(samplers)]
        for future in sent:
            future.result(60)
        return [future.result(60) for future in received]


def test_every_sampler_has_the_trainers_weights_after_each_update(monkeypatch):
    monkeypatch.setattr(gloo_checkpoint_engine.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    trainers = [CheckpointEngineRegistry.new("gloo", bucket_size=1, is_master=first) for first in (True, False)]
    samplers = [CheckpointEngineRegistry.new("gloo", bucket_size=1) for _ in range(2)]
    for _update in range(2):
        for received in exchange(trainers, samplers):
            assert list(received) == list(WEIGHTS)
            for name, weight in WEIGHTS.items():
                assert received[name].dtype == weight.dtype
                assert torch.equal(received[name], weight)
