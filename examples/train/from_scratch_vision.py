"""A tiny Qwen3-VL made from scratch, with the processor that shows it images: for recipes on machines without an
accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from from_scratch import Batch, Row, collate, console
from transformers import PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from verl_tool.agent_loop.generators.qwen_images import QwenImages

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Control tokens beyond those of a chat."""
PATCH = 16
"""Pixels of a patch, across and down; four patches are a token."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen2.5-VL's, without its system message and its videos."""
CONTRAST = 0.25
"""Of the range of a pixel, 0 to 1, the part that becomes one unit; half of what it is in Qwen3-VL, so that the model
learns more quickly."""
SPREAD = 3.0
"""Times the usual deviation of weights, which is for wide models: with it so small a one learns nothing for long."""


def make_vision_model(
    tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int, vision: int, depth: int, seed: int
) -> Qwen3VLForConditionalGeneration:
    """A random model whose vocabulary is exactly the tokenizer's, with `VISION` in it.

    `hidden` and `vision` are the widths of the language model and of the vision tower, multiples of 32; `layers` and
    `depth` are their layers.
    """
    torch.manual_seed(seed)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    heads = hidden // 32
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": depth,
        "hidden_size": vision,
        "intermediate_size": vision * 2,
        "num_heads": vision // 32,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text | ends,
        vision_config=tower,
        tie_word_embeddings=True,
        **ends,
        **dict(zip(names, map(tokenizer.convert_tokens_to_ids, VISION), strict=True)),
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(SPREAD)
    counts = [sum(p.numel() for p in part.parameters()) for part in (model, model.model.visual)]
    console.print(f"{counts[0]:,} weights, {counts[1]:,} of them for images, {len(tokenizer)} tokens")
    return model


def make_processor(tokenizer: PreTrainedTokenizerBase, pixels: int) -> Qwen3VLProcessor:
    """Scales each image to `pixels`, as nearly as its shape allows."""
    images = Qwen2VLImageProcessor(
        patch_size=PATCH,
        size={"shortest_edge": pixels, "longest_edge": pixels},
        image_mean=[0.5] * 3,
        image_std=[CONTRAST] * 3,
    )
    return Qwen3VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH),
        chat_template=tokenizer.chat_template,
    )


def with_images(images: QwenImages) -> Callable[[int, Sequence[Row]], Batch]:
    """`collate` for rows with ``images``, of which each has one at least."""

    def collated(padding: int, rows: Sequence[Row]) -> Batch:
        batch = collate(padding, rows)
        shown = images.features([image.decode() for row in rows for image in row["images"]])
        return batch | shown | {"mm_token_type_ids": (batch["input_ids"] == images.pad_id).int()}

    return collated
