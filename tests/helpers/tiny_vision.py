"""A tiny random Qwen3-VL or Qwen2.5-VL with tokenizer and processor, saved in the form of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3VLConfig

SIDE = 2
"""Width and height in tokens of every square picture."""
_TEXTS = ["Which digit?", "<zoom>0</zoom>", "<answer>5</answer>", "system\nuser\nassistant\ntool\n"]


def make_vision_model(kind: str, folder: Path) -> None:
    """Save a model with its tokenizer and processor."""
    for part in vision_model(kind):
        part.save_pretrained(folder)


def vision_model(kind: str) -> tuple[Any, Any, Any]:
    """Make a model with tokenizer and processor, of `kind` ``qwen3_vl`` (as recipes make it) or ``qwen2_5_vl``: 1.4
    million random weights."""
    import from_scratch_vision as recipe
    from from_scratch import make_tokenizer

    tokenizer = make_tokenizer(_TEXTS * 4, 320, recipe.CHAT_TEMPLATE, recipe.VISION)
    model = recipe.make_vision_model(tokenizer, hidden=128, layers=3, vision=96, depth=2, seed=0)
    if kind == "qwen2_5_vl":
        return _qwen2_5(model.config, recipe.SPREAD), tokenizer, _qwen2_5_processor(tokenizer)
    return model, tokenizer, recipe.make_processor(tokenizer, (recipe.PATCH * 2 * SIDE) ** 2)


def _qwen2_5(like: Qwen3VLConfig, spread: float) -> Any:
    """Make one of the same sizes, with weights `spread` times as large as in wide models."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    given = like.to_dict()
    text, vision = given.pop("text_config"), given.pop("vision_config")
    for part in (given, text, vision):
        part.pop("model_type")
    sizes = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
    tower = {name: vision[name] for name in sizes}
    tower |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    del text["rope_parameters"]["mrope_interleaved"]
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **given)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(spread)
    return model


def _qwen2_5_processor(tokenizer: PreTrainedTokenizerBase) -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    pixels = (14 * 2 * SIDE) ** 2
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=14, size={"shortest_edge": pixels, "longest_edge": pixels}),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=14),
        chat_template=tokenizer.chat_template,
    )
