"""Parse consecutive calls that are JSON objects: ``{"name": "f", "arguments": {…}}, {…}``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from verl_tool.formats import json_call


@dataclass(frozen=True)
class JsonObject:
    """A call and its position in the text."""

    call: json_call.JsonCall
    start: int
    end: int
    id: str | None

    def ending_at(self, end: int) -> JsonObject:
        return replace(self, end=end)


def read_objects(text: str, start: int, between: re.Pattern[str]) -> list[JsonObject]:
    """Parse the objects from `start` on, which `between` separates. A malformed one extends to the end of the text.

    Never raises, and takes time linear in the length of `text`.
    """
    objects: list[JsonObject] = []
    position = start
    while position < len(text) and text[position] in "{[":
        try:
            value, end = json_call.decode_at(text, position)
        except ValueError:
            parsed = json_call.parse(text[position:])
            return [*objects, JsonObject(parsed, position, len(text), None)]
        call_id = value.get("id") if isinstance(value, dict) else None
        parsed = json_call.from_value(text[position:end], value)
        objects.append(JsonObject(parsed, position, end, call_id if isinstance(call_id, str) else None))
        separator = between.match(text, end)
        position = separator.end() if separator else end
    return objects
