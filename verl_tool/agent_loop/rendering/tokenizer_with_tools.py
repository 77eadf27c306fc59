"""A tokenizer that passes tools to its chat template in every conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.agent_loop.tokenizer import Tokenizer

SCHEMA_MARK = "SCHEMATELLSTHIS7f3a"
"""Word that no template contains."""
PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": SCHEMA_MARK,
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A text."}},
            "required": ["x"],
        },
    },
}
"""Tool that shows where a template writes the schemas."""


class TokenizerWithTools:
    """Wraps `tokenizer` and adds `schemas` (OpenAI's ``tools``) to each conversation that has no tools."""

    def __init__(self, tokenizer: Tokenizer, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self.eos_token_ids, self.special_tokens = tokenizer.eos_token_ids, tokenizer.special_tokens

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools or self._schemas
        )
