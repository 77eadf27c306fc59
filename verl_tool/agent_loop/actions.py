"""The action in a turn of the model, if there is one, and its calls: found once, here, for all who ask for them."""

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
    """What the tools are sent of one turn of the model."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    """Those that the loop's formats find in it, in the order of the text, without overlap."""

    @property
    def sent_calls(self) -> Sequence[Call]:
        """`calls`; if there are none, the tag that the action ends with, which may be a tool's own (`calls_sent`)."""
        return self.calls or last_tag(self.text)


@dataclass(frozen=True)
class ParsedTurn:
    """One turn of the model as text."""

    text: str
    """Without the tokens that end the turn."""
    raw_text: str
    action: Action
    """The turn up to the end of the first stop string, else `text`."""
    calls_tools: bool
    """Whether the model asked for the action: it wrote a stop string, or, if there is none to write, a call."""

    @classmethod
    def parse(cls, text: str, raw_text: str, stops: Sequence[str], formats: Sequence[Format]) -> ParsedTurn:
        """The turn with its calls. `stops`: the strings that end an action, if any."""
        stopped = stopped_action(raw_text, stops)
        action = text if stopped is None else stopped
        calls = tuple(find_calls(action, formats))
        return cls(text, raw_text, Action(action, calls), stopped is not None or (bool(calls) and not stops))

    @property
    def call_spans(self) -> tuple[tuple[int, int], ...]:
        """Where in `raw_text` each call begins and ends; a token that ends the turn may be what closes the last one."""
        return tuple((call.start, self._end_of(call)) for call in self.action.calls)

    def _end_of(self, call: Call) -> int:
        if call.end < len(self.action.text):
            return call.end
        return call.end + max(
            (len(stop) for stop in call.format.stop if self.raw_text.startswith(stop, call.end)), default=0
        )


def parsed_calls(calls: Iterable[Call]) -> tuple[ParsedCall, ...]:
    """The calls as records have them."""
    return tuple(
        ParsedCall(without_surrogates(call.name), call.arguments_json(), call.start, call.end) for call in calls
    )


def calls_of(record: CallRecord) -> tuple[ParsedCall, ...]:
    """The calls of a recorded action. A record that has none (of another project, or older than the field) is searched
    with the built-in formats."""
    return parsed_calls(calls_sent(record.action, ALL_FORMATS)) if record.calls is None else record.calls


class LoopFormats:
    """The formats in which the loop finds calls, of all trajectories and of those that may use some tools only."""

    def __init__(self, names: Sequence[str] | None, tools: Sequence[ToolDescription] = ()) -> None:
        """`names`: the option `formats`. `tools`: what ``GET /tools`` of the server tells; empty if nobody knows.

        Raises ConfigError as `loop_formats` does.
        """
        self.all = loop_formats(names, tools)
        known = () if names is not None else tools
        self._of_tools = {tool.name: tool.formats for tool in known}

    def of(self, listed: Collection[str] | None) -> tuple[Format, ...]:
        """Those of a trajectory that may use the `listed` tools only: a tag of any other tool is text to it, as on a
        server that does not have that tool. None: all."""
        if listed is None or not self._of_tools:
            return self.all
        specs = {spec for name in listed for spec in self._of_tools.get(name, ())}
        return tuple(fmt for fmt in self.all if fmt in ALL_FORMATS or not specs.isdisjoint(specs_of(fmt)))


def stopped_action(text: str, stops: Sequence[str]) -> str | None:
    """The turn up to the end of the first stop string, or None.

    The last token may hold text behind the stop string. It stays in the tokens, where the model wrote it, and is no
    part of the action.
    """
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else None


def length_to_stop(token_ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer, least: int = 0) -> int | None:
    """How many tokens there are up to the one in which a stop string first becomes complete; None if none does.

    What an engine that looks for `stops` behind each token would have generated, had it not been interrupted, or had it
    not drawn several tokens at a time. Behind the first `least` tokens only, as with vLLM's ``min_tokens``.
    """
    if not stops:
        return None
    skipped = len(tokenizer.decode(token_ids[:least])) if least else 0

    def complete(n: int) -> bool:
        text = tokenizer.decode(token_ids[:n])
        return any(stop in text[max(0, skipped + 1 - len(stop)) :] for stop in stops)

    # Where bytes are tokens, those of an unfinished character spoil the text of the bytes before them.
    last = range(len(token_ids), max(least, len(token_ids) - _BYTES_OF_A_CHARACTER), -1)
    found = next((n for n in last if complete(n)), None)
    if found is None:
        return None
    low, high = least, found
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if complete(middle) else (middle, high)
    while earlier := [n for n in range(max(least + 1, high - _BYTES_OF_A_CHARACTER), high) if complete(n)]:
        high = earlier[0]
    return high
