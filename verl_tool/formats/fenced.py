"""Markdown fences: a block opened by ```` ```python ````, answered by a block ```` ```output ````.

The name of a call is the fence's language, so that it can name any tool. Blocks in other languages, such as ``json`` in
an answer, are found too, but no tool runs them. A block ends at the next line that begins with a fence of at least the
same length, or else at a fence within a line, as in ``print(1)``` ``. A block without an end is not a call: the stop
string comes after the end, so that an engine that strips the stop string does not strip the end.

Models trained on this format open the output block themselves and stop there. The observation then continues it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from verl_tool.formats import markers
from verl_tool.formats.base import Call
from verl_tool.formats.scan import Cursor, Scanner
from verl_tool.formats.usage import usage_by_example
from verl_tool.protocol import ToolDescription

OUTPUT = "output"
_LANGUAGE = r"[A-Za-z][A-Za-z0-9_+.#-]*"
_LENGTHS = range(3, 9)
"""Supported numbers of backticks in a fence. Each length needs its own search, so they are bounded."""
_OPENING = (
    rf"`(?<!``)(?P<rest>`{{{_LENGTHS[0] - 1},{_LENGTHS[-1] - 1}}})(?!`)[ \t]*(?P<language>{_LANGUAGE})[ \t]*\r?\n"
)
"""A fence without a backtick before it. Its first backtick is outside the group, as `Scanner` requires."""
BROWSER = "browser"
_COMMANDS = (
    *("click", "type", "hover", "press", "scroll", "new_tab", "tab_focus", "close_tab", "page_close", "page_focus"),
    *("goto", "go_back", "go_forward", "stop", "select", "none"),
)
_COMMAND_OPENING = rf"`(?<!``)``(?!`)\s{{0,4}}(?P<command>{'|'.join(_COMMANDS)})(?=[ \t]*(\[|\n?```))"
_FENCE_LINE = {n: re.compile(rf"^[ \t]*(?P<fence>`{{{n},}})(?P<rest>[^\n]*)", re.MULTILINE) for n in _LENGTHS}
"""Patterns of a line that begins with a fence of at least n backticks, by n."""
_WORD = re.compile(_LANGUAGE)


class FencedFormat:
    """Fenced blocks of code."""

    name = "fenced"
    stop: tuple[str, ...] = (markers.FENCE + OUTPUT,)
    observation: tuple[str, str] | None = (markers.FENCE + OUTPUT, "\n" + markers.FENCE)

    def __init__(self) -> None:
        self._scanner = Scanner(_OPENING, (markers.FENCE,), self.observation)

    def markers(self) -> tuple[str, ...]:
        """Return the strings to claim with `markers.claim`."""
        return (markers.FENCE,)

    def find_calls(self, text: str) -> list[Call]:
        calls = self._scanner.calls(text, self._take)
        if calls and text[calls[-1].end :].strip() == self.stop[0]:
            first = next(i for i, call in enumerate(calls) if call.name == calls[-1].name)
            calls[first] = replace(calls[first], output_opened=True)
        return calls

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        text, body, fence = cursor.text, match.end(), "`" + match["rest"]
        line = cursor.search(_FENCE_LINE[len(fence)], body)
        limit = line.start() if line else len(text)
        if line is None or _opens(line["rest"]):
            close = text.find(fence, body, limit)
            if close < 0:
                return None, limit
            inner_end, end = close, close + len(fence)
        else:
            inner_end = line.start()
            end = line.start("fence") if line["rest"].strip() == OUTPUT else line.end("fence")
        return Call(match["language"], text[body:inner_end], match.start(), end, self), end

    def render(self, output: str, call: Call | None = None) -> str:
        opening = "" if call and call.output_opened else f"\n{markers.FENCE}{OUTPUT}"
        return f"{opening}\n{markers.escape_markers(output)}\n{markers.FENCE}\n"

    def write(self, name: str, payload: str) -> str:
        """Write a call as a model would."""
        return f"{markers.FENCE}{name}\n{payload}\n{markers.FENCE}\n"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        return usage_by_example(self, tools, lambda tool: self.write(tool.name, "…").rstrip())


class WebArenaFormat(FencedFormat):
    """WebArena's commands to a browser in a fence without a language: ```` ```click [12]``` ````, as verl-tool's
    ``text_browser`` takes them. The name of a call is ``browser``, and its payload the command."""

    name = "webarena"

    def __init__(self) -> None:
        super().__init__()
        self._scanner = Scanner(_COMMAND_OPENING, (markers.FENCE,), self.observation)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        begin = match.start("command")
        close = cursor.find(markers.FENCE, match.end())
        if close < 0:
            return None, match.end()
        end = close + len(markers.FENCE)
        return Call(BROWSER, cursor.text[begin:close].strip(), match.start(), end, self), end

    def write(self, name: str, payload: str) -> str:
        """Write a call as a model would."""
        return f"{markers.FENCE}{payload}{markers.FENCE}\n"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        return usage_by_example(self, tools, lambda tool: self.write(tool.name, "click [12]").rstrip())


def _opens(rest: str) -> bool:
    """Return whether a fence line opens a new block, by the text after the fence."""
    word = rest.strip()
    return word != OUTPUT and _WORD.fullmatch(word) is not None
