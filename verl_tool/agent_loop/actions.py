"""Find the action and the calls in a turn of the model. Every other module takes them from here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from verl_tool.agent_loop.observation import without_surrogates
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import CallRecord, ParsedCall
from verl_tool.formats import ALL_FORMATS, Call, Format, loop_formats
from verl_tool.formats.find import calls_sent, find_calls, last_tag
from verl_tool.formats.load import specs_of
from verl_tool.protocol import ToolDescription

_BYTES_OF_A_CHARACTER = 4


@dataclass(frozen=True)
class Action:
    """The part of a model's turn that is sent to the tools."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    """Calls that the loop's formats find in `text`, in order and without overlap."""

    @property
    def sent_calls(self) -> Sequence[Call]:
        """`calls`, or else the tag at the end of the action, which may belong to a tool (see `calls_sent`)."""
        return self.calls or last_tag(self.text)


@dataclass(frozen=True)
class ParsedTurn:
    """One turn of the model, as text."""

    text: str
    """The turn without the tokens that end it."""
    raw_text: str
    action: Action
    """The turn up to the end of the first stop string, or all of `text`."""
    calls_tools: bool
    """Whether the model wrote a stop string or, if no stop strings are set, a call."""

    @classmethod
    def parse(cls, text: str, raw_text: str, stops: Sequence[str], formats: Sequence[Format]) -> ParsedTurn:
        """Parse one turn. `stops` are the strings that end an action."""
        stopped = stopped_action(raw_text, stops)
        action = text if stopped is None else stopped
        calls = tuple(find_calls(action, formats))
        return cls(text, raw_text, Action(action, calls), stopped is not None or (bool(calls) and not stops))

    @property
    def call_spans(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each call in `raw_text`. The token that ends the turn may also close the last call."""
        return tuple((call.start, self._find_end(call)) for call in self.action.calls)

    def _find_end(self, call: Call) -> int:
        if call.end < len(self.action.text):
            return call.end
        return call.end + max(
            (len(stop) for stop in call.format.stop if self.raw_text.startswith(stop, call.end)), default=0
        )


def parsed_calls(calls: Iterable[Call]) -> tuple[ParsedCall, ...]:
    """Convert calls to the form that records store."""
    return tuple(
        ParsedCall(without_surrogates(call.name), call.arguments_json(), call.start, call.end) for call in calls
    )


def calls_of(record: CallRecord) -> tuple[ParsedCall, ...]:
    """Return the calls of a recorded action. If the record has no `calls` field (it is older, or another project wrote
    it), search its action with the built-in formats."""
    return parsed_calls(calls_sent(record.action, ALL_FORMATS)) if record.calls is None else record.calls


class LoopFormats:
    """The formats in which the loop finds calls: in all trajectories, or in those restricted to some tools."""

    def __init__(self, names: Sequence[str] | None, tools: Sequence[ToolDescription] = ()) -> None:
        """`names` is the option `formats`. `tools` is the server's answer to ``GET /tools``; empty if it is unknown.

        Raises ConfigError as `loop_formats` does.
        """
        self.all = loop_formats(names, tools)
        known = () if names is not None else tools
        self._of_tools = {tool.name: tool.formats for tool in known}

    def of(self, listed: Collection[str] | None) -> tuple[Format, ...]:
        """Return the formats of a trajectory that may use only the `listed` tools (None: all tools). In such a
        trajectory, the tag of any other tool is plain text, as if the server did not have that tool."""
        if listed is None or not self._of_tools:
            return self.all
        specs = {spec for name in listed for spec in self._of_tools.get(name, ())}
        return tuple(fmt for fmt in self.all if fmt in ALL_FORMATS or not specs.isdisjoint(specs_of(fmt)))


def stopped_action(text: str, stops: Sequence[str]) -> str | None:
    """Return the turn up to the end of the first stop string, or None if it contains none.

    The last token may hold text after the stop string. That text stays in the tokens but is not part of the action.
    """
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else None


def length_to_stop(
    token_ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer, min_tokens: int = 0
) -> int | None:
    """Count the tokens up to the one that first completes a stop string. Returns None if no stop string is complete.

    This is the length at which an engine that checks for `stops` after each token would have stopped, had it neither
    been interrupted nor drawn several tokens at a time. The first `min_tokens` tokens are not searched, as in vLLM.
    """
    if not stops:
        return None
    skipped = len(tokenizer.decode(token_ids[:min_tokens])) if min_tokens else 0

    def complete(n: int) -> bool:
        text = tokenizer.decode(token_ids[:n])
        return any(stop in text[max(0, skipped + 1 - len(stop)) :] for stop in stops)

    # With byte-level tokens, the bytes of an unfinished character corrupt the text of the bytes before them.
    last = range(len(token_ids), max(min_tokens, len(token_ids) - _BYTES_OF_A_CHARACTER), -1)
    found = next((n for n in last if complete(n)), None)
    if found is None:
        return None
    low, high = min_tokens, found
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if complete(middle) else (middle, high)
    while earlier := [n for n in range(max(min_tokens + 1, high - _BYTES_OF_A_CHARACTER), high) if complete(n)]:
        high = earlier[0]
    return high
