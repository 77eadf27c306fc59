"""How the tokenizer spells the strings that calls are marked by."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tool.agent_loop.prompt.prompt_renderer import schema_of
from verl_tool.agent_loop.rendering.tool_messages import ROLE
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import QUESTION, Setup
from verl_tool.formats.native import NATIVE
from verl_tool.formats.tool_response import OBSERVATION

_TOKENS = ("<>", "[]")
"""First and last character of what is a token of its own in models that are trained on it."""


def markers_survive(setup: Setup) -> Iterator[Finding]:
    """A marker that is encoded and decoded again is the same: the loop looks for it in decoded text."""
    if not setup.options.enable_agent:
        return
    for marker in _markers(setup):
        text = setup.tokenizer.decode(setup.tokenizer.encode(f"x {marker} x"))
        if marker not in text:
            what = f"the tokenizer makes {text!r} of {f'x {marker} x'!r}: no call marked by {marker!r} can be found"
            yield Finding("markers_survive", Severity.ERROR, what, "choose another format, or another tokenizer")


def markers_are_tokens(setup: Setup) -> Iterator[Finding]:
    """Markers that the template writes too, and control tokens of a native format, are one token each."""
    if not setup.options.enable_agent:
        return
    encode = setup.tokenizer.encode
    of_template = _text_of_template(setup)
    native = setup.taught in NATIVE
    lengths = {marker: len(encode(marker)) for marker in _markers(setup)}
    split = {marker: n for marker, n in lengths.items() if n > 1}
    odd = {mark: n for mark, n in split.items() if _is_token(mark, setup) and (native or mark in of_template)}
    if odd:
        what = (
            f"the tokenizer splits markers of the format {setup.taught.name!r}: {_describe(odd)}; models that call so "
            "have a token for each"
        )
        remedy = "see that tokenizer, template and format are of one model; one made from scratch spells them out"
        yield Finding("markers_are_tokens", Severity.WARNING, what, remedy)
    others = {marker: n for marker, n in split.items() if marker not in odd}
    if others:
        what = f"markers of {setup.taught.name!r} that the model spells out: {_describe(others)}"
        yield Finding("markers_are_tokens", Severity.NOTE, what, "")
    merged = [s for s in setup.options.action_stop_tokens if encode(f"{s}\n")[: len(encode(s))] != encode(s)]
    if merged:
        what = (
            f"the last token of {', '.join(map(repr, merged))} may hold a line end too: it stays in the model's turn, "
            "and is no part of the call"
        )
        yield Finding("markers_are_tokens", Severity.NOTE, what, "")


def _is_token(mark: str, setup: Setup) -> bool:
    """Whether a marker is one that opens or closes a call, and looks like a token."""
    fmt = setup.taught
    return mark in (*fmt.markers(), *fmt.stop) and mark not in (fmt.observation or ()) and mark[0] + mark[-1] in _TOKENS


def _markers(setup: Setup) -> list[str]:
    """Those of the format that is taught, and the stop strings. A template that writes observations has its own."""
    fmt, options = setup.taught, setup.options
    by_template = options.enable_mtrl and options.mtrl_role == ROLE
    marks = [*fmt.markers(), *fmt.stop, *options.action_stop_tokens]
    return [mark for mark in dict.fromkeys(marks) if not (by_template and mark in OBSERVATION)]


def _text_of_template(setup: Setup) -> str:
    """A conversation with tools, a call and its answer, as the template writes it."""
    call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "…", "name": "tool", "tool_call_id": "call00000"},
    ]
    tools = [schema_of(tool) for tool in setup.example_tools]
    return (setup.rendered(messages) or "") + (setup.rendered(QUESTION, tools) or "")


def _describe(lengths: dict[str, int]) -> str:
    return ", ".join(f"{marker!r} is {n} tokens" for marker, n in lengths.items())
