"""A tiny random Qwen3-VL or Qwen2.5-VL with tokenizer and processor, saved as Hugging Face would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIDE = 2
"""Every picture becomes so many tokens wide and high, if it is square."""
_END, _VISION = "<|im_end|>", ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEXTS = ["Which digit?", "<zoom>0</zoom>", "<answer>5</answer>", "system\nuser\nassistant\ntool\n"]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_vision_model(kind: str, folder: Path) -> None:
    """Save one with its tokenizer and processor."""
    for part in vision_model(kind):
        part.save_pretrained(folder)


def vision_model(kind: str, spread: float = 3.0) -> tuple[Any, Any, Any]:
    """One of `kind` ``qwen3_vl`` or ``qwen2_5_vl``, its tokenizer and processor: 1.4 million random weights, `spread`
    times as large as wide models have them."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = _config(kind, tokenizer)
    family = {"qwen3_vl": "Qwen3VL", "qwen2_5_vl": "Qwen2_5_VL"}[kind]
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(spread)
    patch = config.vision_config.patch_size
    pixels = (patch * 2 * SIDE) ** 2
    videos = {"qwen3_vl": transformers.Qwen3VLVideoProcessor, "qwen2_5_vl": transformers.Qwen2VLVideoProcessor}[kind]
    processor = getattr(transformers, f"{family}Processor")(
        image_processor=Qwen2VLImageProcessor(patch_size=patch, size={"shortest_edge": pixels, "longest_edge": pixels}),
        tokenizer=tokenizer,
        video_processor=videos(patch_size=patch),
        chat_template=_TEMPLATE,
    )
    return model, tokenizer, processor


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    special = ["<|endoftext|>", "<|im_start|>", _END, *_VISION]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    learned.train_from_iterator(_TEXTS * 4, trainer)
    parts = json.loads(learned.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=parts["vocab"],
        merges=[tuple(merge) for merge in parts["merges"]],
        eos_token=_END,
        pad_token=special[0],
        unk_token=None,
        additional_special_tokens=special[1:],
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _config(kind: str, tokenizer: Any) -> Any:
    import transformers

    hidden, ids = 128, tokenizer.convert_tokens_to_ids(_VISION)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": rope,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "out_hidden_size": hidden,
    }
    if kind == "qwen3_vl":
        text["head_dim"] = 32
        rope["mrope_interleaved"] = True
        vision |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig
    else:
        vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        config = transformers.Qwen2_5_VLConfig
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return config(
        text_config=text | ends,
        vision_config=vision,
        tie_word_embeddings=True,
        **ends,
        **dict(zip(names, ids, strict=True)),
    )
