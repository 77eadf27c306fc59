"""What verl's engine is asked, and what it answers."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.replica import TokenOutput

from verl_tool.agent_loop.generators.verl_generator import VerlGenerator


class Client:
    """Notes what it is asked, as the engine's process reads it."""

    def __init__(self, stop_reason: str = "completed") -> None:
        self.asked: list[dict] = []
        self._stop_reason = stop_reason

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority):
        self.asked.append(pickle.loads(pickle.dumps(sampling_params)))
        return TokenOutput(token_ids=[], stop_reason=self._stop_reason)


async def test_an_aborted_turn_is_told():
    generator = VerlGenerator(Client("aborted"), "vllm")
    generator.begin("t")
    assert (await generator.generate([1], {}, "t")).stop_reason == "aborted"


@pytest.mark.parametrize("stop", [[], ["<call>"]])
async def test_vllm_makes_one_output_a_turn(stop):
    sampling = pytest.importorskip("vllm.sampling_params")
    client = Client()
    generator = VerlGenerator(client, "vllm")
    generator.begin("t")
    given = {"temperature": 0.5, "stop": stop, "max_tokens": 3}
    await generator.generate([1], given, "t")
    assert set(given) == {"temperature", "stop", "max_tokens"}
    params = sampling.SamplingParams(**client.asked[0])
    assert params.output_kind is sampling.RequestOutputKind.FINAL_ONLY
    assert params.detokenize == bool(stop)


async def test_other_engines_are_asked_nothing_more():
    client = Client()
    generator = VerlGenerator(client, "replay")
    generator.begin("t")
    await generator.generate([1], {"temperature": 0.5}, "t")
    assert client.asked == [{"temperature": 0.5}]


async def test_each_turn_has_a_seed_of_its_own_that_follows_from_the_trajectory_s():
    client = Client()
    generator = VerlGenerator(client, "vllm")
    for trajectory, seed in (("a", 5), ("b", 5), ("c", 6), ("d", None)):
        generator.begin(trajectory, seed=seed)
        for _ in range(2):
            await generator.generate([1], {}, trajectory)
    seeds = [asked.get("seed") for asked in client.asked]
    assert seeds[:2] == seeds[2:4]
    assert len({*seeds[:2], *seeds[4:6]}) == 4
    assert seeds[6:] == [None, None]
