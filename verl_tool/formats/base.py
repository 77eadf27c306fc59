"""The interface of formats: how a model writes a call and reads an observation.

A format handles text only: it finds calls, renders observations, and has stop strings and a usage prompt. It does not
know the tools: the name of a call decides which tool runs it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verl_tool.content.parts import Part, TextPart
from verl_tool.errors import ContentError
from verl_tool.protocol import ToolDescription
from verl_tool.util.json_text import encode_json

_ATTEMPTS = 4


@dataclass(frozen=True)
class Call:
    """One call in a model's text."""

    name: str
    """Name from the model: a tag, a fence's language, or the ``name`` of a JSON call; empty if it cannot be read."""
    input: str
    """The payload as text (code, expression, query). For a JSON call, the only string argument, or all arguments as
    JSON if there are several."""
    start: int
    """Offset of the call's first character in the text."""
    end: int
    """Offset after the call's last character."""
    format: Format
    """Format of the call. It also renders the observation."""
    arguments: Mapping[str, Any] | None = None
    """Arguments of a JSON call."""
    error: str | None = None
    """Why the call cannot be run, such as broken JSON, as a message for the model; None if it is well formed."""
    id: str | None = None
    """Id of the call, in formats that have one."""
    missing: str = ""
    """Closing string that the engine cut off together with the stop string. The observation begins with it."""
    output_opened: bool = False
    """Whether the model wrote the line that opens the observation (its stop string). The observation omits it then."""

    def arguments_json(self) -> str:
        """Return the arguments as a JSON object. Free text (code, a query) is its member ``input``."""
        if self.arguments is not None:
            with contextlib.suppress(RecursionError, TypeError):
                return encode_json(dict(self.arguments)).decode()
        return encode_json({"input": self.input}).decode()


@runtime_checkable
class Format(Protocol):
    """One format. No method raises for any text, and all take time linear in its length."""

    name: str
    """Name in configs, such as ``fenced`` or ``hermes``."""
    stop: tuple[str, ...]
    """Strings at which generation stops because a call is complete."""
    observation: tuple[str, str] | None
    """Strings that open and close an observation, if there are any. No format finds calls between them."""

    def markers(self) -> tuple[str, ...]:
        """Return all strings with a meaning in this format, including those of observations. They are broken up in tool
        outputs. Each has at least 3 characters, of which the first two are not white space."""
        ...

    def find_calls(self, text: str) -> list[Call]:
        """Find all calls in `text`, in order and without overlap, but never inside an observation."""
        ...

    def render(self, output: str, call: Call | None = None) -> str:
        """Render an observation for the model. `find_calls` must find nothing in it, whatever `output` contains."""
        ...

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        """Return a paragraph for a system prompt that says how to call these tools."""
        ...


def render_parts(fmt: Format, parts: Sequence[Part], call: Call | None = None) -> list[Part]:
    """Render an output with images or audios: `fmt` renders its texts, and the media keep their places among them.

    Raises ContentError if the format leaves out a medium or changes their order.
    """
    for _ in range(_ATTEMPTS):
        # Each medium is rendered as a random word. If the format breaks one up, other words may stay whole.
        media = {secrets.token_hex(8): part for part in parts if not isinstance(part, TextPart)}
        words = iter(media)
        output = "".join(part.text if isinstance(part, TextPart) else next(words) for part in parts)
        texts = _between(list(media), fmt.render(output, call))
        if texts is not None:
            visible: list[Part] = [TextPart(texts[0])]
            for part, text in zip(media.values(), texts[1:], strict=True):
                visible += [part, TextPart(text)]
            return [part for part in visible if part != TextPart("")]
    raise ContentError(f"the format {fmt.name!r} leaves out an image or audio of an output; let render keep all of it")


def _between(words: Sequence[str], text: str) -> list[str] | None:
    """Split `text` at the words. Returns None unless each occurs exactly once, in this order."""
    texts: list[str] = []
    for word in words:
        before, found, text = text.partition(word)
        if not found:
            return None
        texts.append(before)
    texts.append(text)
    return None if any(word in each for each in texts for word in words) else texts
