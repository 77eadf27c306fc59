"""Parts that need vLLM: sampling, tools, sleep, images."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from verl_tool.doctor.gpu_smoke import tiny_models
from verl_tool.doctor.gpu_smoke.part import Figures, PartContext, PartFailed, PartSkipped
from verl_tool.doctor.gpu_smoke.torch_parts import check_trajectories, roll_out, running_tool_server

GPU_MEMORY = 0.3
"""Share of the device that an engine takes."""
MAX_MODEL_LEN = 256
FREED_SHARE = 0.5
"""Of what the engine holds, at least so much must be free while it sleeps."""
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": 0}


def check_engine(context: PartContext) -> Figures:
    """vLLM's log-probabilities of what it samples are transformers'. On a GPU with CUDA graphs."""
    path = tiny_models.make_text_model(context.folder)
    tokenizer = tiny_models.load_tokenizer(path)
    prompts = [tokenizer.encode(prompt) for prompt in tiny_models.PROMPTS]

    async def sample() -> tuple[list[Any], Figures]:
        started = time.monotonic()
        async with running_engine(path, context, enforce_eager=False) as engine:
            start_seconds = time.monotonic() - started
            params = {**_SAMPLING, "max_tokens": 64}
            started = time.monotonic()
            found = await asyncio.gather(
                *(engine.generate(list(prompt), dict(params), str(i)) for i, prompt in enumerate(prompts))
            )
            tokens = sum(len(generation.token_ids) for generation in found)
            return found, {"start_seconds": start_seconds, "tokens_per_second": tokens / (time.monotonic() - started)}

    generations, figures = asyncio.run(sample())
    model = tiny_models.load_text_model(path, context.device)
    differences = tiny_models.Differences()
    with torch.no_grad():
        for prompt, generation in zip(prompts, generations, strict=True):
            differences.add(tiny_models.token_log_probs(model, prompt, generation.token_ids), generation.log_probs)
    return figures | differences.check(context.device, "vLLM beside transformers")


def check_tool_calls(context: PartContext) -> Figures:
    """The loop through vLLM with a tool server: calls are answered, and the record is what transformers makes of it."""
    from verl_tool.client import ToolClient

    path = tiny_models.make_text_model(context.folder)

    async def run(url: str) -> list[Any]:
        async with running_engine(path, context) as engine, ToolClient(url) as tools:
            return await roll_out(context, engine, tools, **_SAMPLING)

    with running_tool_server(context.folder) as url:
        trajectories = asyncio.run(run(url))
    return check_trajectories(context, trajectories)


def check_sleep(context: PartContext) -> Figures:
    """While vLLM sleeps its memory is free, and awake it has the weights that it had."""
    if context.device != "cuda":
        raise PartSkipped("vLLM sleeps on accelerators only")
    from vllm import LLM, SamplingParams

    path = tiny_models.make_text_model(context.folder)
    tokenizer = tiny_models.load_tokenizer(path)
    prompts = [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in tiny_models.PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0)
    at_first = torch.cuda.mem_get_info()[0]
    llm = LLM(
        model=str(path),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=GPU_MEMORY,
        enforce_eager=True,
        enable_sleep_mode=True,
        enable_prefix_caching=False,
    )

    def sample() -> list[list[float]]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
        return [
            [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs, strict=True)]
            for each in outputs
        ]

    before, awake = sample(), torch.cuda.mem_get_info()[0]
    figures: Figures = {"held_gib": (at_first - awake) / 2**30}
    started = time.monotonic()
    llm.sleep(level=1)
    asleep = torch.cuda.mem_get_info()[0]
    figures |= {"sleep_seconds": time.monotonic() - started, "freed_gib": (asleep - awake) / 2**30}
    started = time.monotonic()
    llm.wake_up()
    figures["wake_seconds"] = time.monotonic() - started
    after = sample()
    if figures["freed_gib"] < FREED_SHARE * figures["held_gib"]:
        raise PartFailed(f"asleep, {figures['freed_gib']:.2f} GiB of {figures['held_gib']:.2f} GiB were freed")
    differences = tiny_models.Differences()
    for was, now in zip(before, after, strict=True):
        if len(was) != len(now):
            raise PartFailed("awake, the engine writes other texts than before")
        differences.add(torch.tensor(now), was)
    return figures | differences.check(context.device, "awake beside before")


def check_engine_images(context: PartContext) -> Figures:
    """A vision model in vLLM reads images as in transformers."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from verl_tool.agent_loop.generators.qwen_images import QwenImages
    from verl_tool.content.parts import encode_image

    path = tiny_models.make_vision_model(context.folder)
    tokenizer = tiny_models.load_tokenizer(path)
    images = QwenImages(AutoProcessor.from_pretrained(path).image_processor, tokenizer)
    pictures = [encode_image(Image.new("RGB", (64, 64), (80 * i, 40, 90))) for i in range(3)]
    text = tokenizer.encode("Say one:\n")
    prompts = [[*images.of(picture), *text] for picture in pictures]

    async def sample() -> list[Any]:
        async with running_engine(path, context, images=images) as engine:
            params = {**_SAMPLING, "max_tokens": 16}
            return await asyncio.gather(
                *(
                    engine.generate(list(prompt), dict(params), str(i), images=[picture])
                    for i, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True))
                )
            )

    generations = asyncio.run(sample())
    dtype = tiny_models.dtype_on(context.device)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).to(context.device).eval()
    differences = tiny_models.Differences()
    with torch.no_grad():
        for prompt, picture, generation in zip(prompts, pictures, generations, strict=True):
            found = tiny_models.log_probs_with_images(model, images, prompt, generation.token_ids, [picture])
            differences.add(found, generation.log_probs)
    return differences.check(context.device, "images in vLLM beside transformers")


@asynccontextmanager
async def running_engine(
    model: Path, context: PartContext, *, enforce_eager: bool = True, images: Any = None
) -> AsyncIterator[Any]:
    """The evaluation's own vLLM engine, a `Generator` of the loop."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from eval_service.engines.vllm_engine import VllmEngine
    from eval_service.settings import VllmSettings

    settings = VllmSettings(
        dtype=str(tiny_models.dtype_on(context.device)).removeprefix("torch."),
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=GPU_MEMORY,
        max_num_seqs=64,
        enforce_eager=enforce_eager,
    )
    engine = await asyncio.to_thread(VllmEngine, str(model), settings, images=images)
    try:
        yield engine
    finally:
        await engine.close()
