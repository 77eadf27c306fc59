"""A trajectory's actions as OpenAI's ``tool_calls``, and what the tools gave as messages of the role ``tool``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_tool.content.parts import AudioPart, ImagePart, Part, TextPart, to_wire
from verl_tool.formats import Format
from verl_tool.formats.find import calls_sent


class CallLog:
    """Numbers the calls of one trajectory. `trajectory_id` makes their ids unique."""

    def __init__(self, trajectory_id: str, formats: Sequence[Format]) -> None:
        self._trajectory_id = trajectory_id
        self._formats = formats
        self._calls = 0
        self._messages = 0
        self._last_id: str | None = None

    def calls_in(self, action: str) -> list[dict[str, Any]]:
        """The calls in an action, named as the model named them; none if no format finds one, nor the action ends in
        a tag.

        A call of free text (code, a query) has it as the argument ``input``.
        """
        entries = []
        for call in calls_sent(action, self._formats):
            self._last_id = f"call_{self._trajectory_id}_{self._calls}"
            entries.append(
                {
                    "index": self._calls,
                    "id": self._last_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json()},
                }
            )
            self._calls += 1
        if not entries:
            self._last_id = None
        return entries

    def message(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What the tools gave for the action of the last `calls_in`. Several calls of an action have one message, which
        bears the last one's id. Its content is a text; with images, a list of texts and of images as data URIs, as in a
        request. Takes milliseconds for a large image."""
        content: object = "".join(part.text for part in parts if isinstance(part, TextPart))
        if any(isinstance(part, ImagePart) for part in parts):
            content = [_content(part) for part in parts if not isinstance(part, AudioPart)]
        entry = {"index": self._messages, "role": "tool", "tool_call_id": self._last_id, "content": content}
        self._messages += 1
        return entry


def _content(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": to_wire(part)}}
