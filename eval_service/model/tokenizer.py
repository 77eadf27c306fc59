"""The model's tokenizer, and chat templates that refuse a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from eval_service.openai.errors import TemplateRejectedError
from verl_tool.agent_loop.generators.end_tokens import generation_end_tokens
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.errors import ConfigError


class ServedTokenizer(HFTokenizer):
    """As in training; a template's own error is told as TemplateRejectedError."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it, those of added tokens too."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        except (TemplateError, TypeError, KeyError) as error:
            # A template is a program of the model's authors, and raises these on messages that it does not expect.
            raise TemplateRejectedError(f"the chat template refuses these messages: {error}") from error


def load_tokenizer(
    name: str,
    *,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> ServedTokenizer:
    """The tokenizer in a folder or on the hub, with the end tokens of the model there; `chat_template` takes the place
    of its own. Raises ConfigError if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {name!r}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    more = generation_end_tokens(name, trust_remote_code=trust_remote_code)
    return ServedTokenizer(tokenizer, chat_template_kwargs, more)
