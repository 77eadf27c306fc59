"""Edits as functions of texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.servers.tools._programs import cut_middle
from verl_tool.servers.tools.workspace.text_edits import (
    EditError,
    Text,
    digest,
    insert,
    insert_after,
    numbered,
    replace,
    replace_once,
    undo,
    view,
)

FILE = Text("one\ntwo\nthree\ntwo\n")


def test_a_text_that_stands_there_once_is_replaced() -> None:
    edited = replace_once(FILE, "one\ntwo", "1\n2\n2.5", "f")
    assert edited.file.text == "1\n2\n2.5\nthree\ntwo\n"
    assert edited.snippet(1000).splitlines() == [
        "     1\t1",
        "     2\t2",
        "     3\t2.5",
        "     4\tthree",
        "     5\ttwo",
    ]


@pytest.mark.parametrize(
    ("old", "told"),
    [
        ("four", "No replacement was performed, old_str `four` did not appear verbatim in f."),
        (
            "two",
            "No replacement was performed. Multiple occurrences of old_str `two` in lines [2, 4]. "
            "Please ensure it is unique",
        ),
        ("two\n", "in lines [2, 4]"),
        ("", "old_str is empty"),
    ],
)
def test_an_old_text_that_is_absent_is_reported(old: str, told: str) -> None:
    with pytest.raises(EditError) as caught:
        replace_once(FILE, old, "x", "f")
    assert told in str(caught.value)


def test_overlapping_places_are_several() -> None:
    with pytest.raises(EditError, match=r"in lines \[1\]"):
        replace_once(Text("aaa"), "aa", "b", "f")


@pytest.mark.parametrize(
    ("before", "line", "text", "after"),
    [
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 2, "x\ny\n", "a\nb\nx\ny\n"),
        ("a\nb", 2, "x", "a\nb\nx"),
        ("", 0, "x", "x\n"),
        ("a\n", 1, "", "a\n\n"),
    ],
)
def test_lines_are_put_in(before: str, line: int, text: str, after: str) -> None:
    assert insert_after(Text(before), line, text).file.text == after


@pytest.mark.parametrize("line", [-1, 3])
def test_a_line_that_is_not_there(line: int) -> None:
    with pytest.raises(EditError, match="give a number from 0 to that"):
        insert_after(Text("a\nb\n"), line, "x")


@given(st.binary(max_size=200).filter(lambda content: b"\0" not in content))
def test_every_byte_that_is_not_edited_stays(content: bytes) -> None:
    file = Text.of(content, "f")
    assert file.encoded() == content
    assert insert_after(file, 0, "x").file.encoded().split(b"\n", 1)[1:] in ([content], [], [content + b"\n"])
    numbered(file.lines, 1, None, 100).encode()


def test_line_breaks_of_windows_stay() -> None:
    file = Text.of(b"a\r\nb\r\n", "f")
    assert replace_once(file, "a\nb", "c\nd", "f").file.encoded() == b"c\r\nd\r\n"
    assert Text.of(b"a\r\nb\n", "f").text == "a\r\nb\n"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(EditError, match="binary file"):
        Text.of(b"\x7fELF\0", "f")
    with pytest.raises(EditError, match="no character"):
        Text("\ud800").encoded()


@given(st.lists(st.text(max_size=9), max_size=40), st.integers(1, 12), st.integers(1, 50), st.integers(100, 300))
def test_a_cut_view_is_the_whole_one_cut(lines: list[str], first: int, last: int, limit: int) -> None:
    lines = [line.replace("\n", "") for line in lines for _ in range(5)]
    whole = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[first - 1 : last], first))
    assert numbered(lines, first, last, limit) == cut_middle(whole, limit)


def test_numbers_of_a_long_file_count_their_digits() -> None:
    lines = [""] * 1_100_000
    whole = "\n".join(f"{number:6}\t" for number in range(1, len(lines) + 1))
    assert numbered(lines, 1, None, 1000) == cut_middle(whole, 1000)


@pytest.mark.parametrize(
    ("text", "old"),
    [("a" * 3_000_000, "a"), ("a" * 3_000_000, "a" * 1_000_000), ("\n" * 3_000_000, "\n"), ("ab\n" * 1_000_000, "b")],
    ids=["letters", "long text", "line breaks", "lines"],
)
def test_an_ambiguous_old_text_is_reported_with_some_of_its_lines(text: str, old: str) -> None:
    with pytest.raises(EditError, match=r"in lines \[1(, \d+)*(, …)?\]") as caught:
        replace_once(Text(text), old, "x", "f")
    assert len(str(caught.value)) < len(old) + 300


def test_an_edit_is_undone() -> None:
    changed, before, after, _ = replace(b"one\n", "f", "one", "two", 100)
    assert (changed, after) == (b"two\n", digest(changed))
    assert undo(before, after, changed, "f", 100) == (b"one\n", "     1\tone")
    with pytest.raises(EditError, match="was changed since"):
        undo(before, after, b"three\n", "f", 100)


def test_an_edit_makes_no_file_that_could_not_be_edited_again() -> None:
    with pytest.raises(EditError, match="would have"):
        insert(b"a" * (8 << 20), "f", 0, "b", 100)
    assert view(b"", "f", None, 100) == "(the file is empty)"
