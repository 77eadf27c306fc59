"""Where in a turn of the model an action is, if there is one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.formats import ALL_FORMATS, Format, loop_formats
from verl_tool.formats.load import specs_of
from verl_tool.protocol import ToolDescription

_BYTES_OF_A_CHARACTER = 4


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


def written_call(text: str, formats: Sequence[Format]) -> str | None:
    """The whole turn if a format finds a call in it, or None. For turns that no stop string ends."""
    return text if any(fmt.find_calls(text) for fmt in formats) else None
