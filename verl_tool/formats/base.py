"""How a model writes a call and reads an observation.

A format knows text only: it finds calls, renders observations, and tells its stop strings and usage prompt. It knows
no tool; which tool takes a call is decided by the call's name.
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
    """One call as it stands in a model's text."""

    name: str
    """What the model named: a tag, a fence's language, or the ``name`` of a JSON call; empty if it is unreadable."""
    input: str
    """The payload as free text (code, expression, query). For a JSON call: the one string argument, if there is just
    one, else the arguments as JSON."""
    start: int
    """Offset of the call's first character in the text."""
    end: int
    """Offset behind its last character."""
    format: Format
    """The format that it is written in; its observation is rendered by the same."""
    arguments: Mapping[str, Any] | None = None
    """The arguments of a JSON call."""
    error: str | None = None
    """Why the call cannot be run (broken JSON, say), in words for the model; None if it is well formed."""
    id: str | None = None
    """The format's own id of the call, where it has one."""
    missing: str = ""
    """The closing string that the engine cut off with the stop string; the observation begins with it."""
    output_opened: bool = False
    """The model itself wrote the line that opens the observation (its stop string); the observation leaves it out."""

    def arguments_json(self) -> str:
        """The arguments as a JSON object; what is none (code, a query) is its member ``input``."""
        if self.arguments is not None:
            with contextlib.suppress(RecursionError, TypeError):
                return encode_json(dict(self.arguments)).decode()
        return encode_json({"input": self.input}).decode()


@runtime_checkable
class Format(Protocol):
    """One format. Every method is total: arbitrary text never raises, and time is linear in its length."""

    name: str
    """As users write it in configs, such as ``fenced`` or ``hermes``."""
    stop: tuple[str, ...]
    """Strings at which generation stops because a call is complete."""
    observation: tuple[str, str] | None
    """What opens and what closes an observation; None if nothing does. No format looks for calls between the two."""

    def markers(self) -> tuple[str, ...]:
        """The strings that mean something in this format, those of an observation too: they are broken up in what a
        tool answers. At least 3 characters each, the first two not white space."""
        ...

    def find_calls(self, text: str) -> list[Call]:
        """All calls in `text`, in order, without overlap. Text of an observation is never one."""
        ...

    def render(self, output: str, call: Call | None = None) -> str:
        """The observation as the model reads it. `find_calls` finds nothing in it, whatever `output` holds."""
        ...

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        """A paragraph for a system prompt that tells how to call these tools."""
        ...


def render_parts(fmt: Format, parts: Sequence[Part], call: Call | None = None) -> list[Part]:
    """The observation of an output that is not text alone: what `fmt` makes of its texts, with the images and audios
    where they stood among them.

    Raises ContentError if the format leaves one out, or changes their order.
    """
    for _ in range(_ATTEMPTS):
        # Each is rendered as a word that no output holds. If the format breaks one up, another may be left whole.
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
    """What stands before, between and behind the words; None unless each is there once, in this order."""
    texts: list[str] = []
    for word in words:
        before, found, text = text.partition(word)
        if not found:
            return None
        texts.append(before)
    texts.append(text)
    return None if any(word in each for each in texts for word in words) else texts
