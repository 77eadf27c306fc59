"""A run of an agent on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_tool.checks.finding import Finding
from verl_tool.checks.setup import Setup
from verl_tool.doctor.agent_run import AgentRun
from verl_tool.doctor.display import finding_lines, print_section
from verl_tool.gateway.conversation import Role
from verl_tool.gateway.gateway_app import DIALECTS
from verl_tool.gateway.session_record import SESSION

_MAX_TOOLS = 30
_MAX_ANSWER = 50
_ROUTES = {dialect.name: dialect.path for dialect in DIALECTS}


def print_agent_report(console: Console, setup: Setup, run: AgentRun | None, findings: Sequence[Finding]) -> None:
    """Print all of it. `run` None: the findings stand in its way."""
    if run is not None:
        tools = dict.fromkeys(tool["function"]["name"] for _, each in run.exchanges for tool in each.request.tools)
        names = ", ".join(list(tools)[:_MAX_TOOLS]) or "none"
        window = "unknown" if setup.context_length is None else f"{setup.context_length:,} tokens"
        first = next((turn.answer.prompt_tokens for turn, _ in run.exchanges if turn.has_tools == bool(tools)), 0)
        lines = {
            "calls in": setup.taught.name,
            "window": window,
            "first prompt": f"{first:,} tokens",
            "tools": f"{len(tools)}: {names}",
            "ended": _end(run),
        }
        for name, value in lines.items():
            console.print(Text.assemble((f"{name:14}", "bold"), value))
        print_section(console, "What it asks for, and what is trained")
        console.print(answer_table(run))
    print_section(console, "Findings")
    for line in finding_lines(findings):
        console.print(line)


def answer_table(run: AgentRun) -> Table:
    """A line for each answer."""
    table = Table()
    for name in (
        "answer",
        "agent",
        "route",
        "messages",
        "prompt",
        "goes on behind",
        "training row",
        "the model writes",
    ):
        table.add_column(name, overflow="fold")
    session, segments = run.record.extra[SESSION], run.record.segments
    for answer, (turn, placement) in zip(session["answers"], run.exchanges, strict=False):
        roles = "".join(message.role.value[0] for message in placement.messages if message.role is not Role.SYSTEM)
        row = str(segments[answer["segment"]].row + 1) if "segment" in answer else f"none: {answer['unused']}"
        written = ", ".join(f"calls {name}" for name in answer["calls"]) or repr(turn.answer.text[:_MAX_ANSWER])
        table.add_row(
            *(str(turn.number + 1), turn.agent_id[:20] or "main", _ROUTES.get(turn.dialect, turn.dialect)),
            *(str(len(placement.messages)) if len(roles) > 20 else f"{len(placement.messages)} ({roles})",),
            *(f"{turn.answer.prompt_tokens:,}", "nothing" if turn.parent is None else str(turn.parent.number + 1)),
            *(row, written),
        )
    rows = len(run.record.rows) if any("segment" in answer for answer in session["answers"]) else 0
    table.caption = f"{rows} training row{'' if rows == 1 else 's'}"
    return table


def _end(run: AgentRun) -> str:
    if run.was_stopped:
        return "no: it went on asking"
    if "error" in run.program:
        return f"it did not run: {run.program['error']}"
    code = run.program["exit_code"]
    return "no: killed at its time limit" if code is None else f"exit {code} after {run.program['seconds']:.1f} s"
