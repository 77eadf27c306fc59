"""Tokenizers built here in the shapes of real ones: their models, decoders, tokens and templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokenizers
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LETTERS = [chr(c) for c in range(32, 127)]
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}</s>{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}"
    "<｜end▁of▁sentence｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{# <|user|> <|assistant|> <|system|> #}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""A template without tools."""
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nAnswer with <tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n'
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}{% endif %}"
) + PLAIN_TEMPLATE
"""A template that describes tools as Qwen's."""


def chat_tokenizer(template: str) -> Any:
    """Make a tokenizer of bytes and of the tokens of ChatML."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return byte_level(special, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)


@dataclass(frozen=True)
class Shape:
    """One tokenizer, and what a tool's output must never become."""

    tokenizer: Any
    forbidden: tuple[str, ...]
    """Control tokens and marks of turns."""

    @property
    def forbidden_ids(self) -> set[int]:
        """Return ids of those that are tokens."""
        known = self.tokenizer.get_vocab()
        return {known[token] for token in self.forbidden if token in known}


def shape(name: str) -> Shape:
    return _SHAPES[name]()


def byte_level(special: list[str], ordinary: list[str] = [], **kwargs: Any) -> Any:  # noqa: B006 - only read
    """Make one like those of GPT-2, Llama 3, Qwen, DeepSeek and gpt-oss: bytes, merged or not."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["the answer is 日本 café 😀 user assistant\n\n"] * 5, trainer)
    return _with_tokens(core, special, ordinary, **kwargs)


def byte_fallback(special: list[str], ordinary: list[str] = [], **kwargs: Any) -> Any:  # noqa: B006 - only read
    """Make one like those of Llama 2, Mistral and Gemma: letters, and bytes for other characters."""
    words = ["▁", *LETTERS[1:], "é", "▁t", "he", "▁the"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(words)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_tokens(core, special, ordinary, **kwargs)


def unigram(special: list[str], **kwargs: Any) -> Any:
    """Make one like those of T5 and many SentencePiece models: pieces may spell a control token, and characters are
    folded."""
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("▁", -2.0), *((c, -3.0) for c in LETTERS[1:]), ("▁the", -2.5)]
    core = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()])
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return _with_tokens(core, special, [], normalized=True, **kwargs)


def _with_tokens(core: Any, special: list[str], ordinary: list[str], normalized: bool = False, **kwargs: Any) -> Any:
    core.add_special_tokens([AddedToken(token, special=True, normalized=normalized) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    core.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **kwargs)


def _qwen() -> Shape:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    ordinary = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>", "<|repo_name|>"]
    template = _CHATML + "{# <think> #}"
    made = byte_level(special, ordinary, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)
    return Shape(made, (*special, "<think>", "<|fim_prefix|>", "<|repo_name|>"))


def _llama3() -> Shape:
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
    special += ["<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(40))]
    return Shape(byte_level(special, eos_token="<|eot_id|>", chat_template=_LLAMA3), tuple(special))


def _mistral_v1() -> Shape:
    made = byte_fallback(["<s>", "</s>"], eos_token="</s>", bos_token="<s>", chat_template=_INST)
    return Shape(made, ("<s>", "</s>", "[INST]", "[/INST]"))


def _mistral_v3() -> Shape:
    special = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    return Shape(byte_fallback(special, eos_token="</s>", chat_template=_INST), tuple(special))


def _deepseek() -> Shape:
    special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    ordinary = ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁output▁end｜>"]
    made = byte_level(special, ordinary, eos_token=special[1], chat_template=_DEEPSEEK)
    return Shape(made, (*special, *ordinary))


def _gemma() -> Shape:
    special = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    made = byte_fallback(special, ["<table>", "\n\n"], eos_token="<eos>", chat_template=_GEMMA)
    return Shape(made, tuple(special))


def _phi() -> Shape:
    special, ordinary = ["<|endoftext|>", "<|end|>"], ["<|user|>", "<|assistant|>", "<|system|>"]
    made = byte_fallback(special, ordinary, eos_token="<|endoftext|>", chat_template=_PHI)
    return Shape(made, (*special, *ordinary))


def _harmony() -> Shape:
    special = ["<|endoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"]
    return Shape(byte_level(special, eos_token="<|return|>", chat_template=_HARMONY), tuple(special))


def _t5() -> Shape:
    special = ["<pad>", "</s>", "<extra_id_0>", "<|turn|>"]
    return Shape(unigram(special, eos_token="</s>", chat_template=_CHATML.replace("im_start", "turn")), tuple(special))


_SHAPES = {
    "qwen": _qwen,
    "llama3": _llama3,
    "mistral_v1": _mistral_v1,
    "mistral_v3": _mistral_v3,
    "deepseek": _deepseek,
    "gemma": _gemma,
    "phi": _phi,
    "harmony": _harmony,
    "t5": _t5,
}
NAMES = tuple(_SHAPES)
