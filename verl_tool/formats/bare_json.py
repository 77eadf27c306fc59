"""Turns that consist of one JSON object: ``{"name": "calculator", "arguments": {…}}``, as Llama 3 writes them.

With prose before or after the object, the turn is an answer that quotes JSON and not a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from verl_tool.formats import json_call, markers
from verl_tool.formats.base import Call
from verl_tool.formats.usage import usage_by_example
from verl_tool.protocol import ToolDescription


class BareJsonFormat:
    """Format in which the whole text is the call."""

    name = "json"
    stop: tuple[str, ...] = ()
    observation: tuple[str, str] | None = None

    def markers(self) -> tuple[str, ...]:
        """Return nothing: an observation is an object too, but has no ``name``."""
        return ()

    def find_calls(self, text: str) -> list[Call]:
        stripped = text.strip()
        if not (stripped.startswith("{") and stripped.endswith("}") and '"name"' in stripped):
            return []
        parsed = json_call.parse(stripped)
        if parsed.error is not None:
            return []
        start = text.index("{")
        return [Call(parsed.name, parsed.input, start, start + len(stripped), self, parsed.arguments)]

    def render(self, output: str, call: Call | None = None) -> str:
        return f"\n{json.dumps({'result': markers.escape_markers(output)}, ensure_ascii=False)}\n"

    def write(self, name: str, payload: str) -> str:
        """Write a call as a model would, with `payload` as its argument ``input``."""
        return json.dumps({"name": name, "arguments": {"input": payload}}, ensure_ascii=False)

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        return usage_by_example(self, tools, lambda tool: self.write(tool.name, "…"))
