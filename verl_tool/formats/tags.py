"""Calls between an opening and a closing tag: ``<python>print(1)</python>``, answered by ``<result>1</result>``.

The closing tag may be missing, because the engine cut it off with the stop string, if the call is at the end of the
text (no string of any format follows). The observation then begins with the missing tag. ``<finish/>`` is a call with
an empty payload. The payload extends from the first opening tag to the first closing tag after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl_tool.formats import json_call, markers
from verl_tool.formats.base import Call
from verl_tool.formats.scan import THOUGHTS, Cursor, Scanner
from verl_tool.formats.usage import usage_by_example
from verl_tool.protocol import ToolDescription

NAME_TAGS, CUSTOM_TAGS = "name_tags", "custom_tags"
"""Names of the formats for tags named like a tool, and for tags from a tool's options."""
TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Tag:
    """The strings that open and close a call, and the name of the call."""

    name: str
    opening: str
    closing: str

    @staticmethod
    def can_be(name: str) -> bool:
        """Return whether `name` can be the name of a tag."""
        return TAG_NAME.fullmatch(name) is not None

    @classmethod
    def named(cls, name: str) -> Tag:
        """Create the tag ``<name>`` and ``</name>``. Raises ValueError if `name` cannot be a tag."""
        if not cls.can_be(name):
            raise ValueError(f"{name!r} cannot be a tag: use letters, digits, '_', '-' and '.', a letter first")
        return cls(name, f"<{name}>", f"</{name}>")

    def empty_forms(self) -> Iterator[str]:
        """Yield the forms without a payload, ``<name/>`` and ``<name />``, if the opening is in angle brackets."""
        if self.opening.startswith("<") and self.opening.endswith(">"):
            yield f"{self.opening[:-1]}/>"
            yield f"{self.opening[:-1]} />"


class TagFormat:
    """Format with one or more tags that share an observation block."""

    thoughts: ClassVar[Mapping[str, str]] = {}
    """Strings that open and close text in which calls are ignored."""

    def __init__(
        self,
        name: str,
        tags: Sequence[Tag],
        observation: tuple[str, str] = ("<result>", "</result>"),
        spaces: tuple[str, str] = ("\n", "\n"),
    ) -> None:
        """`spaces` are the white space around an observation, and around the output inside it."""
        self.name = name
        self._around, self._within = spaces
        self.tags = tuple(tags)
        self.stop = tuple(dict.fromkeys(tag.closing for tag in tags))
        self.observation: tuple[str, str] | None = observation
        self._block = observation
        self._openings = {form: tag for tag in tags for form in (tag.opening, *tag.empty_forms())}
        longest_first = sorted(self._openings, key=len, reverse=True)
        opening = "|".join(re.escape(form) for form in longest_first)
        self._scanner = Scanner(opening, tuple(self._openings), observation, self.thoughts, searches_open_thoughts=True)

    def markers(self) -> tuple[str, ...]:
        """Return the strings to claim with `markers.claim`."""
        return (*self._openings, *self.stop, *self._block)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        tag, body = self._openings[match.group()], match.end()
        if match.group() != tag.opening:
            return self._call(tag, "", match.start(), body), body
        close = cursor.find(tag.closing, body)
        if close >= 0:
            end = close + len(tag.closing)
            return self._call(tag, cursor.text[body:close], match.start(), end), end
        if markers.contains_marker(cursor.text, body):
            return None, body
        end = len(cursor.text)
        return self._call(tag, cursor.text[body:], match.start(), end, missing=tag.closing), end

    def _call(self, tag: Tag, payload: str, start: int, end: int, missing: str = "") -> Call:
        return Call(tag.name, payload, start, end, self, missing=missing)

    def render(self, output: str, call: Call | None = None) -> str:
        missing = call.missing if call else ""
        opening, closing = self._block
        visible = f"{self._within}{markers.escape_markers(output)}{self._within}"
        return f"{missing}{self._around}{opening}{visible}{closing}{self._around}"

    def write(self, name: str, payload: str) -> str:
        """Write a call as a model would."""
        tag = next((tag for tag in self.tags if tag.name == name), self.tags[0])
        return f"{tag.opening}{payload}{tag.closing}"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        return usage_by_example(self, tools, lambda tool: self.write(tool.name, "…"))


class OwnTagFormat(TagFormat):
    """Format with the tags of one tool. A tag in a thought is not a call, unless a stop string ended the turn within
    the thought."""

    thoughts = THOUGHTS


class ToolTagFormat(TagFormat):
    """Format ``<tool>…</tool>``, one tag for all tools. A JSON payload ``{"name": …, "arguments": …}`` names the tool.
    Any other payload is a call named ``tool``, for the tool that takes free text."""

    def __init__(self, name: str = "tool_tags") -> None:
        super().__init__(name, [Tag.named("tool")])

    def _call(self, tag: Tag, payload: str, start: int, end: int, missing: str = "") -> Call:
        parsed = json_call.parse(payload)
        if parsed.error is not None or not parsed.name:
            return super()._call(tag, payload, start, end, missing)
        return Call(parsed.name, parsed.input, start, end, self, parsed.arguments, missing=missing)


class SearchTagFormat(TagFormat):
    """Format ``<search>query</search>``, with exactly the observations of Search-R1's loop: blank lines around
    ``<information>…</information>``, and none within (B. Jin et al.: Search-R1, 2025)."""

    def __init__(self, name: str = "search_tags") -> None:
        super().__init__(name, [Tag.named("search")], ("<information>", "</information>"))

    def render(self, output: str, call: Call | None = None) -> str:
        missing = call.missing if call else ""
        opening, closing = self._block
        return f"{missing}\n\n{opening}{markers.escape_markers(output).strip()}{closing}\n\n"
