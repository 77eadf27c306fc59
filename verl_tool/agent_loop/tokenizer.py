"""The loop's tokenizer interface, and an adapter for tokenizers of transformers (which is not imported here)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

_TURN_MARK = re.compile(r"<[|｜][^\s<>{}]{1,60}[|｜]>|<</?[A-Z]+>>|\[/?[A-Z][A-Z_]*\]")
"""Marks of turns and tools in chat templates, such as ``<|user|>``, ``<｜User｜>``, ``<<SYS>>`` and ``[/INST]``."""


BROKEN_CHARACTER = "\ufffd"
"""Replaces bytes in decoded text that are not a whole character."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""A single byte, as spelled by tokenizers with byte fallback."""


class Tokenizer(Protocol):
    """Converts between text and token ids without adding or cleaning anything."""

    eos_token_ids: frozenset[int]
    """Tokens at which the engine ends a turn by itself."""
    special_tokens: tuple[str, ...]
    """Control tokens as text (``<|im_end|>``), including those that only the chat template knows. Tool output must not
    forge them."""

    def encode(self, text: str) -> list[int]:
        """Encode `text` without a start token. Special tokens written in `text` become their ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation as text. `messages` have ``role`` and ``content``; `tools` have OpenAI's form."""
        ...


class PreTrainedTokenizer(Protocol):
    """The part of transformers' tokenizers that `HFTokenizer` uses."""

    eos_token_id: int | list[int] | None
    all_special_tokens: list[str]

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class HFTokenizer:
    """A transformers tokenizer as the loop's `Tokenizer`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizer,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        more_eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`chat_template_kwargs`, such as ``enable_thinking``, are passed to every rendering. `more_eos_token_ids` are
        those of the model's generation config, at which engines stop too."""
        self.tokenizer = tokenizer
        self.special_tokens = control_tokens(tokenizer)
        self.eos_token_ids = frozenset([*token_ids(tokenizer.eos_token_id), *more_eos_token_ids])
        self._template_kwargs = dict(chat_template_kwargs or {})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # only a list of lists of ids would give a list
        return text

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, which may be a part of a character; None if its spelling does not show them."""
        text = self.decode([token_id])
        if BROKEN_CHARACTER not in text:
            return text.encode()
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        letters = _byte_letters()
        return bytes(letters[c] for c in token) if all(c in letters for c in token) else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=[dict(tool) for tool in tools] if tools else None,
            **self._template_kwargs,
        )
        return text


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Map the letters that byte-level tokenizers (GPT-2 and its descendants) spell bytes with to these bytes. Printable
    Latin-1 bytes are spelled as themselves, all others as letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Return the token ids of a conversation up to the start of the model's turn."""
    return tokenizer.encode(prompt_text(tokenizer, messages, tools))


def prompt_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Render a conversation up to the start of the model's turn."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools)


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return an ``eos_token_id`` (an id, several or None) as a tuple. -1 stands for "no token" and is dropped."""
    ids = (value,) if isinstance(value, int) else tuple(value or ())
    return tuple(token_id for token_id in ids if token_id >= 0)


def control_tokens(tokenizer: PreTrainedTokenizer) -> tuple[str, ...]:
    """Return all texts that mark turns and calls of a conversation.

    These are tokens in a named slot (``eos_token``), added tokens that are special, look like control tokens or appear
    in the chat template, and marks of the template that are not tokens (``[INST]``).
    """
    # A tokenizer from elsewhere may have no `added_tokens_decoder`.
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    template = getattr(tokenizer, "chat_template", None) or ""
    source = template if isinstance(template, str) else "\n".join(template.values())
    found = [
        *tokenizer.all_special_tokens,
        *(str(t) for t in added if t.special or _TURN_MARK.fullmatch(str(t)) or _is_mark_in(str(t), source)),
        *_TURN_MARK.findall(source),
    ]
    return tuple(dict.fromkeys(token for token in found if token.strip()))


def _is_mark_in(token: str, template: str) -> bool:
    return token.startswith("<") and token.endswith(">") and token in template
