"""The model that goes on is drawn from as the run's engine drew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from branch_runs import branch_run
from run_folders import MODEL
from stored_runs import TOKENIZER, trajectory

from eval_service.settings import Sampling
from tests.eval_service.engines.test_completions_engine import Server, choice
from verl_tool.errors import ConfigError
from verl_tool.replay.branch.model import generation_kwargs, open_model
from verl_tool.replay.branch.run_loop import load_run_loop


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        ({"temperature": 0.0}, {"do_sample": False, "repetition_penalty": 1.0}),
        (
            {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "ignore_eos": True},
            *[
                {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.0}
                | {"eos_token_id": -1}
            ],
        ),
    ],
)
def test_sampling_in_the_words_of_transformers(sampling: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert generation_kwargs(Sampling(**sampling)) == wanted


async def test_two_commands_draw_other_tokens(tmp_path: Path) -> None:
    run = branch_run(tmp_path, [trajectory(0, "Buy.", [], None)])
    loop, drawn = load_run_loop(run, None, validation=False), []
    for _ in range(2):
        torch.manual_seed(0)  # as in a new process
        async with open_model(loop, None) as model:
            made = await model.generator.generate(TOKENIZER.encode("Buy."), {"max_tokens": 32}, "r")
        assert made.log_probs is not None
        assert len(made.log_probs) == len(made.token_ids) <= 32
        drawn.append(list(made.token_ids))
    assert drawn[0] != drawn[1]


async def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    run = branch_run(tmp_path, [trajectory(0, "Buy.", [], None)])
    (run / MODEL / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no generative model"):
        async with open_model(load_run_loop(run, run / MODEL, validation=False), None):
            pass


async def test_an_endpoint_is_asked_with_token_ids_and_the_runs_sampling(tmp_path: Path) -> None:
    run = branch_run(tmp_path, [trajectory(0, "Buy.", [], None)])
    server = Server()
    server.answer = choice([7, 8], "stop", logprobs={"token_logprobs": [-0.5, -1.0]})
    async with server.running() as engine, open_model(load_run_loop(run, None, validation=True), engine._base) as model:
        made = await model.generator.generate([1, 2], {**model.sampling_params, "max_tokens": 9}, "r")
    assert (made.token_ids, made.log_probs) == ([7, 8], [-0.5, -1.0])
    (body,) = server.bodies
    assert (body["prompt"], body["temperature"], body["logprobs"], body["max_tokens"]) == ([1, 2], 0.25, 0, 9)
