"""A small random Qwen3-VL: what the loop records is what the model gives for the whole of it, images and all."""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from toy_images import PAD, PLACEHOLDER, image_tokenizer
from toy_model import Template, ToyTokenizer, ToyTools
from toy_tools import picture

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import Author
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError, ContentError
from verl_tool.protocol import FaultKind, StepResult

PATCH, MERGE = 16, 2


class Pixels:
    """Stands for transformers' image processor where nobody looks at pixels."""

    merge_size = MERGE

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, Any]) -> int:
        if max(height, width) > 200 * min(height, width):
            raise ValueError("absolute aspect ratio must be smaller than 200")
        return math.ceil(height / PATCH / MERGE) * math.ceil(width / PATCH / MERGE) * MERGE**2

    def __call__(self, images: Any, *, return_tensors: str) -> dict[str, Any]:
        raise AssertionError("nobody looks")


def test_an_image_has_a_token_for_each_feature() -> None:
    tokenizer = image_tokenizer()
    images = QwenImages(Pixels(), tokenizer)
    assert tokenizer.decode(images.of(picture(1, (64, 33)))) == PLACEHOLDER.replace(PAD, PAD * 4)
    with pytest.raises(ContentError, match="an image of 300 x 1 pixels: absolute aspect ratio must"):
        images.of(picture(1, (300, 1)))
    with pytest.raises(ConfigError, match="is 43 tokens in this tokenizer, and must be 3"):
        QwenImages(Pixels(), ToyTokenizer(Template()))


def test_an_engine_gets_one_token_for_each_image() -> None:
    tokenizer = image_tokenizer()
    images = QwenImages(Pixels(), tokenizer)
    shown = [picture(1, (64, 33)), picture(2)]
    expanded = [7, *images.of(shown[0]), *images.of(shown[1]), 8]
    assert images.one_each(expanded) == [7, *tokenizer.encode(PLACEHOLDER * 2), 8]
    assert images.one_each([images.pad_id, images.pad_id]) == [images.pad_id]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tokenizer() -> ToyTokenizer:
    return image_tokenizer()


@pytest.fixture(scope="module")
def processor(torch: Any) -> Any:
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    return module.Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=MERGE)


@pytest.fixture(scope="module")
def model(torch: Any, tokenizer: ToyTokenizer) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    begin, pad, end = tokenizer.encode(PLACEHOLDER)
    text = {
        "vocab_size": len(tokenizer.vocabulary),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": PATCH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = {"image_token_id": pad, "vision_start_token_id": begin, "vision_end_token_id": end, "video_token_id": 0}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    made = transformers.Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weights in made.parameters():
            if weights.dim() > 1:
                weights.mul_(3.0)
    return made


class FourTokens:
    """A generator whose turns end behind four tokens, whatever they are."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, images: Sequence[ImagePart] = ()
    ) -> Generation:
        params = {**sampling_params, "max_tokens": 4}
        generation = await self._generator.generate(prompt_ids, params, request_id, images)
        return replace(generation, stop_reason="stop")


def exact_log_probs(model: Any, torch: Any, images: QwenImages, ids: list[int], shown: list[ImagePart]) -> Any:
    """Of each token behind the first, by one pass over the whole. [tokens - 1, vocabulary]"""
    tokens = torch.tensor([ids])
    more = {}
    if shown:
        kinds = (tokens == images.pad_id).int()
        more = {**images.features([image.decode() for image in shown]), "mm_token_type_ids": kinds}
    with torch.no_grad():
        return model(input_ids=tokens, **more).logits[0].log_softmax(-1)[:-1]


async def test_what_is_recorded_is_what_the_model_gives(
    model: Any, processor: Any, tokenizer: ToyTokenizer, torch: Any
) -> None:
    module = importlib.import_module("verl_tool.agent_loop.generators.transformers_generator")
    images = QwenImages(processor, tokenizer)
    banned = tokenizer.encode(PLACEHOLDER)
    kwargs = {"do_sample": False, "suppress_tokens": banned}
    generator = module.TransformersGenerator(model, tokenizer, kwargs, images=images)
    sizes = [(64, 64), (40, 90)]
    replies = {
        "text": lambda action, n: f"<obs{n}>",
        "one": lambda action, n: StepResult("t", "a <image> b", image=[picture(n, sizes[0])]),
        "two": lambda action, n: StepResult("t", "<image><image>", image=[picture(n, size) for size in sizes]),
    }
    options = EpisodeOptions(max_turns=2, min_turns=2, enable_mtrl=True, mtrl_sep="\n{obs}\n")
    prompt = tokenizer.encode("what is it?")

    async def one(reply: Any) -> Any:
        episode = Episode(FourTokens(generator), ToyTools(reply), tokenizer, options, image_tokens=images)
        return await episode.run(prompt)

    trajectories = dict(zip(replies, await asyncio.gather(*map(one, replies.values())), strict=True))
    assert {name: len(t.visible_images) for name, t in trajectories.items()} == {"text": 0, "one": 2, "two": 4}
    for trajectory in trajectories.values():
        ids = trajectory.prompt_ids + trajectory.response_ids
        exact = exact_log_probs(model, torch, images, ids, trajectory.visible_images)
        log_probs = trajectory.response_log_probs
        assert log_probs is not None
        for position, (token, mask) in enumerate(zip(trajectory.response_ids, trajectory.response_mask, strict=True)):
            if mask:
                row = exact[len(trajectory.prompt_ids) - 1 + position]
                row[banned] = -math.inf
                assert log_probs[position] == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-4)
        assert sum(s.author is Author.MODEL for s in trajectory.segments) == 3


async def test_images_for_a_model_of_text_are_a_fault_that_names_it(model: Any, tokenizer: ToyTokenizer) -> None:
    module = importlib.import_module("verl_tool.agent_loop.generators.transformers_generator")
    generator = module.TransformersGenerator(model, tokenizer)
    reply = StepResult("t", "<image>", image=[picture(1)])
    options = EpisodeOptions(enable_mtrl=True, mtrl_sep="\n{obs}\n", min_turns=1)
    tools = ToyTools(lambda action, n: reply)
    episode = Episode(FourTokens(generator), tools, tokenizer, options, image_tokens=QwenImages(Pixels(), tokenizer))
    trajectory = await episode.run(tokenizer.encode("?"))
    assert trajectory.fault is not None
    assert trajectory.fault.kind is FaultKind.MISCONFIGURED
    assert "Qwen3VLForConditionalGeneration got images but does not know how to read them" in trajectory.fault.message
