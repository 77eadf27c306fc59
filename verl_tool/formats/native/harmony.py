"""Tool calls of gpt-oss: messages of its harmony format that are addressed to a tool.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

A message with a recipient other than ``user`` is a call, whatever its channel. A message without a recipient is text or
a thought, which is not searched for calls. The arguments are JSON. If the header does not say ``json`` and they cannot
be parsed, they are the input as free text.

Source: OpenAI's harmony format (package ``openai-harmony``) and the chat template of gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats import json_call
from verl_tool.formats.base import Call
from verl_tool.formats.tool_response import OBSERVATION, ToolResponseFormat

MESSAGE, CALL = "<|message|>", "<|call|>"
_START = "<|start|>"
_MARK = re.compile(r"<\|(?:start|message|end|call|return)\|>")
_HEADER = re.compile(
    r"\s*(?:<\|start\|>(?P<author>\w{1,200}))?\s*(?=<\|channel\|>|to=).*?\bto=(?P<recipient>[^\s<>|]{1,200})", re.DOTALL
)
_MAX_HEADER = 1000
"""Maximum number of characters of a header. A longer text is not a header."""


class HarmonyFormat(ToolResponseFormat):
    """Messages to ``functions.NAME``."""

    name = "harmony"
    stop: tuple[str, ...] = (CALL,)
    rule = "Write a call as a message to the function on the channel commentary"

    def markers(self) -> tuple[str, ...]:
        return (_START, MESSAGE, CALL, "<|channel|>", *OBSERVATION)

    def find_calls(self, text: str) -> list[Call]:
        if MESSAGE not in text or "to=" not in text:
            return []
        calls: list[Call] = []
        header_start = 0
        body_start: int | None = None
        recipient: tuple[str, bool] | None = None
        for mark in _MARK.finditer(text):
            if mark.group() == MESSAGE and body_start is None:
                body_start = mark.end()
                recipient = _recipient(text[max(header_start, mark.start() - _MAX_HEADER) : mark.start()])
            elif mark.group() != MESSAGE:
                starts = mark.group() == _START
                if body_start is not None and recipient:
                    end = mark.start() if starts else mark.end()
                    calls.append(self._call(recipient, text[body_start : mark.start()], header_start, end))
                header_start, body_start, recipient = mark.start() if starts else mark.end(), None, None
        if body_start is not None and recipient:
            calls.append(self._call(recipient, text[body_start:], header_start, len(text)))
        return calls

    def _call(self, recipient: tuple[str, bool], body: str, start: int, end: int) -> Call:
        name, is_json = recipient
        parsed = json_call.parse_arguments(name, body)
        if parsed.error is not None and not is_json:
            parsed = json_call.JsonCall(name, body)
        return Call(name, parsed.input, start, end, self, parsed.arguments, parsed.error)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        provided = json.dumps(dict(arguments), ensure_ascii=False)
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json{MESSAGE}{provided}{CALL}"


def _recipient(header: str) -> tuple[str, bool] | None:
    """Return the tool that a message is addressed to, and whether its content is JSON. None if it is not a call."""
    found = _HEADER.match(header)
    if found is None or found["author"] not in (None, "assistant"):
        return None
    name = found["recipient"].removeprefix("functions.")
    if name in ("", "user", "assistant", "all"):
        return None
    return name, re.search(r"\bjson\b", header[found.end() :]) is not None
