"""The model that continues: a local one run by transformers, or one behind an endpoint with token ids."""

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
    """A generator and its sampling parameters."""

    generator: Generator
    sampling_params: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def open_model(loop: RunLoop, endpoint: str | None) -> AsyncIterator[Model]:
    """Open the model in the folder of `loop`, or the one that `endpoint` serves. Raises ConfigError if the folder has
    no generative model, EngineError if the endpoint does not answer."""
    if endpoint is None:
        yield Model(load_model(loop))
        return
    engine = await CompletionsEngine.connect(CompletionsSettings(url=endpoint), loop.tokenizer.vocab_size)
    try:
        yield Model(engine, {**loop.sampling.model_dump(), "logprobs": 0})
    finally:
        await engine.close()


def load_model(loop: RunLoop) -> TransformersGenerator:
    """Load the model of `loop`. Raises ConfigError if its folder has none."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            loop.model, dtype=loop.dtype, local_files_only=True, trust_remote_code=loop.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"no generative model in {loop.model}: {error}") from error
    torch.seed()  # the default seed would give two commands equal samples
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return TransformersGenerator(model.to(device).eval(), loop.tokenizer, generation_kwargs(loop.sampling))


def generation_kwargs(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of ``model.generate`` that sample like an engine with `sampling`."""
    eos = {"eos_token_id": -1} if sampling.ignore_eos else {}
    penalty = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature == 0:
        return {"do_sample": False, **penalty, **eos}
    sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(0, sampling.top_k)}
    return {"do_sample": True, **sampled, **penalty, **eos}
