"""The model that goes on: one in a local folder, by transformers, or one behind an endpoint with token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from eval_service.engines.completions_engine import CompletionsEngine
from eval_service.settings import CompletionsSettings, Sampling
from verl_tool.agent_loop.generators.base import Generator
from verl_tool.agent_loop.generators.transformers_generator import TransformersGenerator
from verl_tool.errors import ConfigError
from verl_tool.replay.branch.run_loop import RunLoop


@dataclass(frozen=True)
class Model:
    """A source of tokens and the sampling parameters that it is given."""

    generator: Generator
    sampling_params: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def model_of(loop: RunLoop, endpoint: str | None) -> AsyncIterator[Model]:
    """The model in the folder of `loop`, or the one that `endpoint` serves, for as long as the block runs. Raises
    ConfigError if the folder has no model that generates, EngineError if the endpoint does not answer."""
    if endpoint is None:
        yield Model(loaded(loop))
        return
    engine = await CompletionsEngine.connect(CompletionsSettings(url=endpoint), loop.tokenizer.vocab_size)
    try:
        yield Model(engine, {**loop.sampling.model_dump(), "logprobs": 0})
    finally:
        await engine.close()


def loaded(loop: RunLoop) -> TransformersGenerator:
    """The model of `loop` in memory. Raises ConfigError if there is none."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            loop.model, dtype=loop.dtype, local_files_only=True, trust_remote_code=loop.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model that generates in {loop.model}: {error}") from error
    torch.seed()  # PyTorch's own is the same in each process, and so would be the samples of two commands
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return TransformersGenerator(model.to(device).eval(), loop.tokenizer, generation_kwargs(loop.sampling))


def generation_kwargs(sampling: Sampling) -> dict[str, Any]:
    """The arguments of ``model.generate`` that draw as an engine does with `sampling`."""
    ends = {"eos_token_id": -1} if sampling.ignore_eos else {}
    penalty = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature == 0:
        return {"do_sample": False, **penalty, **ends}
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(0, sampling.top_k)}
    return {"do_sample": True, **drawn, **penalty, **ends}
