"""Sampling parameters in SGLang's names, through verl's own SGLang server and the real loop."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("verl")

from sglang_engine import SGLangClient, StandInSGLang, accepted_names
from verl_loop import make_loop, make_tokenizer

from verl_tool.agent_loop.generators.sampling_params import SGLANG_NAMES, SGLANG_SAME_NAMES, for_sglang
from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.servers.tools import load_tools

CALL = "<request><calculator>6*7<call>"
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What verl's agent loop worker asks of an engine."""
PROMPT = [{"role": "user", "content": "6*7?"}]


def test_every_name_is_one_that_sglang_accepts():
    assert SGLANG_SAME_NAMES | set(SGLANG_NAMES.values()) <= accepted_names()
    assert not set(SGLANG_NAMES) & accepted_names()


def test_the_accepted_names_are_sglang_s():
    real = pytest.importorskip("sglang.srt.sampling.sampling_params")
    assert accepted_names() <= set(inspect.signature(real.SamplingParams.__init__).parameters)


def test_parameters_keep_their_values_under_sglang_s_names():
    asked = {
        **{"max_tokens": 5, "min_tokens": 2, "seed": 3, "include_stop_str_in_output": True, "top_k": 0},
        **{"stop": ["<call>"], "stop_token_ids": [9], "skip_special_tokens": False, "min_p": None},
    }
    assert for_sglang(asked) == {
        **{"max_new_tokens": 5, "min_new_tokens": 2, "sampling_seed": 3, "no_stop_trim": True, "top_k": -1},
        **{"stop": ["<call>"], "stop_token_ids": [9], "skip_special_tokens": False},
    }


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words", "detokenize"])
def test_a_parameter_without_a_counterpart_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}.*no counterpart in SGLang"):
        for_sglang({name: [1]})


async def run(engine: StandInSGLang, tokenizer: Any, url: str | None, *overrides: str, window: int = 500) -> Trajectory:
    """One trajectory of a training with SGLang."""
    tools = f"actor_rollout_ref.agent.tool_server_url={url}" if url else "actor_rollout_ref.agent.enable_agent=false"
    client = SGLangClient(engine, max_model_len=window)
    loop = make_loop(
        tokenizer,
        client,
        *("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.agent.action_stop_tokens=['<call>']", tools),
        *("data.max_response_length=200", "actor_rollout_ref.agent.max_turns=1", *overrides),
    )
    output = await loop.run(dict(SAMPLING), raw_prompt=PROMPT)
    record = output.extra_fields["trajectory"]
    assert record.response_log_probs == output.response_logprobs
    return record


@pytest.mark.parametrize(("step", "trims"), [(1, False), (1, True), (7, False)])
async def test_a_turn_ends_behind_its_stop_string_whatever_sglang_leaves(servers: Any, step: int, trims: bool):
    server = await servers.start(load_tools("calculator"))
    tokenizer = make_tokenizer()
    engine = StandInSGLang(tokenizer, [f"{CALL} and more", "42"], step=step, trims=trims)
    record = await run(engine, tokenizer, server.url)
    assert record.segments[1].text == CALL
    assert "42" in record.calls[0].observation
    assert record.stop is StopReason.ANSWERED
    assert record.response_log_probs == [-0.5 * mask for mask in record.response_mask]
    first, second = (request.sampling_params for request in engine.requests)
    assert first["no_stop_trim"] is True
    assert first["stop"] == second["stop"] == ["<call>"]
    assert first["max_new_tokens"] > second["max_new_tokens"]
    assert all(request.return_logprob for request in engine.requests)


async def test_a_turn_that_sglang_s_window_cuts_is_no_answer():
    """verl leaves one token of the window unused; the loop itself would allow it."""
    tokenizer, window = make_tokenizer(), 20
    engine = StandInSGLang(tokenizer, ["x" * 100])
    record = await run(engine, tokenizer, None, f"actor_rollout_ref.agent.max_model_len={window}", window=window)
    assert len(record.prompt_ids) + len(record.response_ids) == window - 1
    assert record.stop is StopReason.MAX_RESPONSE_LENGTH


async def test_sglang_s_abort_is_one():
    tokenizer = make_tokenizer()
    engine = StandInSGLang(tokenizer, ["4"])
    engine.abort_next = True
    assert (await run(engine, tokenizer, None)).stop is StopReason.ABORTED
