"""Tokens, masks and findings on a console."""

from __future__ import annotations

from doctor_setups import PLAIN, setup_of
from rich.console import Console

from verl_tool.checks.finding import Finding, Severity
from verl_tool.doctor.demonstration import StandIn, demonstrate
from verl_tool.doctor.display import HEAD, TAIL, finding_lines, prompt_tokens, response_table, token_text


def test_tokens_are_apart_and_line_ends_are_seen() -> None:
    assert token_text(PLAIN.encode("a\n<|im_end|>"), PLAIN, "green").plain == "a╎↵╎<|im_end|>"


def test_tokens_of_a_call_are_underlined() -> None:
    text = token_text(PLAIN.encode("abc"), PLAIN, "green", [0, 1, 0])
    marked = [text.plain[span.start : span.end] for span in text.spans if "underline" in str(span.style)]
    assert marked == ["b"]


def test_brackets_in_tokens_are_no_markup() -> None:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(token_text(PLAIN.encode("[red]x"), PLAIN, "green"))
    assert "╎]╎x" in capture.get()


def test_a_long_prompt_loses_its_middle_unless_it_is_asked_for() -> None:
    ids = PLAIN.encode("x" * (HEAD + TAIL + 7))
    assert "… 7 tokens (--whole shows them) …" in prompt_tokens(ids, PLAIN, whole=False).plain
    assert "…" not in prompt_tokens(ids, PLAIN, whole=True).plain
    assert "…" not in prompt_tokens(ids[7:], PLAIN, whole=False).plain


def test_findings_come_by_weight_with_their_counts() -> None:
    found = [
        Finding("b", Severity.NOTE, "a note", ""),
        Finding("a", Severity.ERROR, "an error", "mend it"),
        Finding("c", Severity.WARNING, "a warning", ""),
    ]
    lines = [line.plain for line in finding_lines(found)]
    assert lines[0] == "error: an error; mend it [a]"
    assert lines[1:] == ["warning: a warning [c]", "note: a note [b]", "1 error, 1 warning, 1 note"]
    assert [line.plain for line in finding_lines([])] == ["0 errors, 0 warnings, 0 notes"]


async def test_the_table_contains_the_context_of_each_further_row() -> None:
    setup = setup_of(context="summarise", context_tokens=4000)
    demonstration = await demonstrate(setup, StandIn(setup))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(response_table(demonstration, setup.tokenizer))
    printed = " ".join(capture.get().split())
    assert "fed for row 2" in printed
    assert "2 training rows" in printed
