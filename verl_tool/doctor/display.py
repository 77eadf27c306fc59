"""What the doctor shows: tokens in the colour of their author, with their masks, and the findings."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Author, CallRecord
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Setup
from verl_tool.doctor.demonstration import Demonstration
from verl_tool.formats import Call

STYLES = {Author.PROMPT: "cyan", Author.MODEL: "green", Author.TOOL: "yellow", Author.TEMPLATE: "magenta"}
_OF_A_CALL = "underline"
_SEVERITIES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "dim"}
_BORDER = "╎"
_SEEN = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
HEAD, TAIL = 120, 60
"""Tokens that are shown of a longer prompt, at its beginning and its end."""


def print_report(
    console: Console, setup: Setup, demonstration: Demonstration | None, findings: Sequence[Finding], *, whole: bool
) -> None:
    """Print all of it. `whole`: prompts in full length. `demonstration` None: the findings stand in its way."""
    console.print(heading(setup, sound=demonstration is not None))
    if demonstration is not None:
        prompt = demonstration.trajectory.prompt_ids
        print_section(console, f"What the model sees first: {len(prompt)} tokens")
        console.print(prompt_tokens(prompt, setup.tokenizer, whole))
        print_section(console, "How a call is found")
        console.print(call_lines(demonstration))
        print_section(console, "What is appended: mask 1 is trained on")
        console.print(response_table(demonstration, setup.tokenizer, whole))
    print_section(console, "Findings")
    for line in finding_lines(findings):
        console.print(line)


def heading(setup: Setup, *, sound: bool) -> Group:
    """The loop, the ends and the tools, a line each; not `sound`: the template cannot serve, and tells nothing."""
    options = setup.options
    stops = ", ".join(map(repr, options.action_stop_tokens)) or "none"
    formats = ", ".join(options.formats) if options.formats is not None else "all built-in ones"
    mode = "inline: an observation continues the model's turn"
    if not options.enable_agent:
        mode = "without tools"
    elif options.enable_mtrl:
        mode = f"chat: an observation is a turn of {'mtrl_sep' if options.mtrl_sep else f'role {options.mtrl_role!r}'}"
    lines = {
        "loop": mode,
        "calls in": formats,
        "stop strings": stops,
        "tools": ", ".join(tool.name for tool in setup.tools) or "unknown",
    }
    if sound:
        ends = [f"{setup.tokenizer.decode([token])!r} ({token})" for token in sorted(setup.ends)]
        described = [tool.name for tool in setup.prompts.described_tools()]
        lines["told of"] = ", ".join(described) or "none: the prompt is the conversation alone"
        lines["end tokens"] = ", ".join(ends) or "none"
    return Group(*(Text.assemble((f"{name:14}", "bold"), value) for name, value in lines.items()))


def prompt_tokens(ids: Sequence[int], tokenizer: Tokenizer, whole: bool) -> Text:
    """The tokens of a prompt, the middle of a long one left out."""
    style = STYLES[Author.PROMPT]
    if whole or len(ids) <= HEAD + TAIL:
        return token_text(ids, tokenizer, style)
    left = len(ids) - HEAD - TAIL
    middle = Text(f" … {left} tokens (--whole shows them) … ", style="dim italic")
    head, tail = ids[:HEAD], ids[-TAIL:]
    return Text.assemble(token_text(head, tokenizer, style), middle, token_text(tail, tokenizer, style))


def call_lines(demonstration: Demonstration) -> RenderableType:
    """The model's turn, where it ends, and the calls in it."""
    turn = Text(textwrap.indent(demonstration.turn, "  "), style=STYLES[Author.MODEL])
    finished = demonstration.end_reason or "its limit of length"
    lines: list[RenderableType] = [turn, Text(f"The turn ends at {finished}.")]
    if not demonstration.trajectory.calls:
        lines.append(Text("No call is sent to the tools: the turn is taken for the answer.", style="bold yellow"))
    elif not demonstration.calls:
        lines.append(Text("The turn is sent to the tools; the loop itself knows no call in it."))
    lines += [Text(line) for call in demonstration.calls for line in _describe(call)]
    lines += [Text(_answer(record)) for record in demonstration.trajectory.calls]
    return Group(*lines)


def _answer(record: CallRecord) -> str:
    if record.fault is not None:
        return f"The tools fault: {record.fault.kind.value}: {record.fault.message}"
    valid = "valid" if record.valid else f"invalid ({record.invalid_reason or 'no tool understands it'})"
    return f"The tools answer, the call is {valid}: {record.observation!r:.200}"


def _describe(call: Call) -> Iterator[str]:
    what = f"arguments {dict(call.arguments)}" if call.arguments is not None else f"text {call.input!r:.200}"
    yield f"{call.format.name} finds a call of {call.name!r} with the {what}"
    if call.error:
        yield f"  and cannot read it: {call.error}"


def response_table(demonstration: Demonstration, tokenizer: Tokenizer, whole: bool = False) -> Table:
    """The segments behind the prompt: author, mask of the loss, tokens. Tokens of a call are underlined. Where a
    training row begins, what the model is fed there (`whole`: in full length)."""
    trajectory = demonstration.trajectory
    table = Table(show_lines=True)
    for name in ("written by", "mask", "n"):
        table.add_column(name, no_wrap=True, justify="right" if name == "n" else "left")
    table.add_column("tokens", overflow="fold")
    start, row = 0, 0
    for segment in trajectory.response:
        if segment.row > row:
            row = segment.row
            fed = trajectory.contexts[row - 1]
            table.add_row(
                Text(f"fed for row {row + 1}\n({fed.reason})", style=STYLES[Author.PROMPT]),
                *("0", str(len(fed.tokens)), prompt_tokens(fed.tokens, tokenizer, whole)),
            )
        end = start + len(segment.tokens)
        style = STYLES[segment.author]
        masks = sorted(set(trajectory.loss_mask[start:end]))
        tokens = token_text(segment.tokens, tokenizer, style, demonstration.action_mask[start:end])
        who = Text(segment.author.value, style=style)
        table.add_row(who, "/".join(map(str, masks)), str(len(segment.tokens)), tokens)
        start = end
    table.caption = f"the trajectory ends: {trajectory.stop.value}"
    if trajectory.contexts:
        table.caption += f"; {len(trajectory.rows)} training rows"
    return table


def token_text(ids: Sequence[int], tokenizer: Tokenizer, style: str, marked: Sequence[int] = ()) -> Text:
    """Tokens with a border between two; those that are `marked` by 1 are underlined. A line end is shown as ↵."""
    text = Text(overflow="fold")
    for number, token in enumerate(ids):
        if number:
            text.append(_BORDER, style="dim")
        of_call = number < len(marked) and marked[number]
        text.append(tokenizer.decode([token]).translate(_SEEN), style=f"{style} {_OF_A_CALL}" if of_call else style)
    return text


def finding_lines(findings: Sequence[Finding]) -> Iterator[Text]:
    """A paragraph for each finding, the weightiest first, and how many there are of each kind."""
    order = list(Severity)
    for finding in sorted(findings, key=lambda each: order.index(each.severity)):
        label = Text(f"{finding.severity.value}: ", style=_SEVERITIES[finding.severity])
        yield Text.assemble(label, f"{finding} ", (f"[{finding.check}]", "dim"))
    counts = Counter(finding.severity for finding in findings)
    words = ", ".join(f"{counts[each]} {each.value}{'' if counts[each] == 1 else 's'}" for each in Severity)
    yield Text(words, style="bold")


def print_section(console: Console, title: str) -> None:
    """Print a heading."""
    console.print()
    console.print(Text(title, style="bold underline"))
