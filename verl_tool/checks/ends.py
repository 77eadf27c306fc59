"""Where the model's turns end: at stop strings, at end tokens, and at calls that the loop finds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from verl_tool.agent_loop.rendering.template_text import closing_token, control_token_ids
from verl_tool.agent_loop.trajectory import Author
from verl_tool.checks.example_call import ExampleCall, example_of
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Setup
from verl_tool.errors import ConfigError
from verl_tool.formats import Format, format_by_name
from verl_tool.formats.find import find_calls
from verl_tool.formats.load import specs_of


def calls_end(setup: Setup) -> Iterator[Finding]:
    """A stop string ends the calls of the formats, where there are stop strings: no other call is looked for then."""
    stops = setup.options.action_stop_tokens
    if not setup.options.enable_agent or not stops:
        return
    endless = [fmt for fmt in setup.formats if not _ended(fmt, setup, stops)]
    described = ", ".join(map(repr, stops))
    names = ", ".join(fmt.name for fmt in endless)
    needed = sorted({stop for fmt in endless for stop in fmt.stop})
    remedy = f"add {', '.join(map(repr, needed))} to action_stop_tokens" if needed else "leave action_stop_tokens out"
    if setup.options.formats is None:
        if len(endless) == len(setup.formats) and not any(
            stop in text for stop in stops for tool in setup.tools for text in tool.example_actions
        ):
            what = f"action_stop_tokens={list(stops)}: no call of a built-in format, and no tool's example, ends so"
            yield Finding("calls_end", Severity.WARNING, what, "see that the tools have a format that does")
    elif len(endless) == len(setup.formats):
        more = "" if needed else ", with enable_mtrl=true"
        what = f"no call ends: formats={names}, whose calls end at none of action_stop_tokens ({described})"
        yield Finding("calls_end", Severity.ERROR, what, remedy + more)
    elif endless:
        what = f"calls in the format {names} end at none of action_stop_tokens ({described}) and are taken for answers"
        yield Finding("calls_end", Severity.WARNING, what, f"{remedy}, or name the other formats only")


def _ended(fmt: Format, setup: Setup, stops: Sequence[str]) -> bool:
    if set(fmt.stop).intersection(stops):
        return True
    example = example_of(fmt, setup.example_tools)
    return example is not None and any(stop in f"{example.text}\n" for stop in stops)


def tools_are_called(setup: Setup) -> Iterator[Finding]:
    """The loop finds calls in a format in which each tool can be called."""
    options = setup.options
    if not options.enable_agent:
        return
    if options.formats is None and (options.action_stop_tokens or not options.enable_mtrl):
        return  # a stop string ends the call, and the server finds it
    described = setup.prompts.described_tools() or setup.tools
    found = {spec for fmt in setup.formats for spec in specs_of(fmt)}
    deaf = [tool for tool in described if tool.formats and found.isdisjoint(tool.formats)]
    # As long as one can be called, the others may be there for another training.
    severity = Severity.ERROR if len(deaf) == len(described) else Severity.WARNING
    for tool in deaf:
        where = "in chat mode without formats" if options.formats is None else f"with formats={list(options.formats)}"
        what = f"the tool {tool.name!r} is called by {', '.join(tool.formats)} only: not found {where}"
        yield Finding("tools_are_called", severity, what, f"set formats=[{', '.join(map(_as_setting, tool.formats))}]")


def _as_setting(spec: str) -> str:
    """What `formats` takes for a format that a server tells by the name `spec`."""
    try:
        format_by_name(spec)
    except ConfigError:
        return f"path of the file that defines {spec!r}"
    return spec


def turns_end(setup: Setup) -> Iterator[Finding]:
    """Generation knows the token by which the chat template closes an answer, and one that stands behind a call."""
    if not setup.ends:
        what = "neither the tokenizer nor the options name an end token: every turn goes on to its limit of length"
        yield Finding("turns_end", Severity.ERROR, what, "set additional_eos_token_ids, or the tokenizer's eos_token")
        return
    known = ", ".join(_names(setup, setup.ends))
    closing = closing_token(setup.tokenizer, setup.closing_text)
    if closing and not closing & setup.ends:
        what = (
            f"the chat template closes the model's turn by {', '.join(_names(setup, closing))}, at which generation "
            f"does not end (it ends at {known})"
        )
        remedy = f"set additional_eos_token_ids={sorted(closing)} if the model writes it"
        yield Finding("turns_end", Severity.WARNING, what, remedy)
    of_call = setup.options.enable_agent and setup.options.enable_mtrl and not setup.options.action_stop_tokens
    if of_call and setup.example is not None:
        yield from _behind_a_call(setup, setup.example, known)


def _behind_a_call(setup: Setup, example: ExampleCall, known: str) -> Iterator[Finding]:
    call = setup.tokenizer.encode(example.text)
    renderer = setup.renderer
    written: list[int] = call[-1:]
    calls = find_calls(example.text, setup.formats)
    for segment in renderer.next(call, renderer.parts(example.format.render("…")), calls):
        if segment.author is not Author.TEMPLATE:
            break
        written += segment.tokens
    control = [token for token in written if token in control_token_ids(setup.tokenizer)]
    if control and setup.ends.isdisjoint(control):
        what = (
            f"behind a call the chat template writes {', '.join(_names(setup, set(control)))}, and generation ends "
            f"at none of them (it ends at {known}): the model may write the tool's answer itself"
        )
        remedy = f"set additional_eos_token_ids=[{control[0]}], or give the model's folder a generation_config.json"
        yield Finding("turns_end", Severity.WARNING, what, remedy)


def _names(setup: Setup, tokens: Collection[int]) -> list[str]:
    return [repr(setup.tokenizer.decode([token])) for token in sorted(tokens)]
