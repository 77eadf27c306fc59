from __future__ import annotations

import asyncio
from typing import Any

import pytest
from toy_model import ScriptedEngine, ToyTokenizer, ToyTools

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.rollout import RolloutStart, rollout


class Echo(ScriptedEngine):
    """Answers with the prompt's last token, after as many milliseconds."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        if prompt_ids[-1] == 99:
            raise RuntimeError("the engine is dead")
        await asyncio.sleep(prompt_ids[-1] / 1000)
        return Generation([prompt_ids[-1]])


def episode(**options: Any) -> Episode:
    tokenizer = ToyTokenizer()
    settings = EpisodeOptions.load({"action_stop_tokens": ["#"], **options})
    return Episode(Echo(tokenizer, []), ToyTools(lambda action, n: "ok"), tokenizer, settings)


async def test_results_come_in_the_order_of_the_starts() -> None:
    starts = [RolloutStart([5, 9 - i], trajectory_id=str(i)) for i in range(8)]
    trajectories = await rollout(episode(enable_tqdm=False), starts)
    assert [t.trajectory_id for t in trajectories] == [str(i) for i in range(8)]
    assert [t.response_ids for t in trajectories] == [[9 - i] for i in range(8)]


async def test_the_bar_is_shown_if_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    await rollout(episode(enable_tqdm=False), [RolloutStart([1])], title="quiet")
    assert "quiet" not in capsys.readouterr().out
    await rollout(episode(enable_tqdm=True), [RolloutStart([1])], title="loud")
    out = capsys.readouterr().out
    assert "loud" in out
    assert "1/1" in out


async def test_one_that_raises_cancels_the_others() -> None:
    slow_one_ended = asyncio.Event()

    class Watched(Echo):
        async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
            try:
                return await super().generate(prompt_ids, sampling_params, request_id)
            except asyncio.CancelledError:
                slow_one_ended.set()
                raise

    tokenizer = ToyTokenizer()
    options = EpisodeOptions(enable_agent=False, enable_tqdm=False)
    running = Episode(Watched(tokenizer, []), None, tokenizer, options)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        await asyncio.wait_for(rollout(running, [RolloutStart([255]), RolloutStart([1, 99])]), 10)
    assert slow_one_ended.is_set()
