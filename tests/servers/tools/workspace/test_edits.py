"""The edits of a workspace, and the process that makes those of large files."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest
from hostile import MAX_CALLBACK_SECONDS, longest_callback

from verl_tool.servers.tools.base import CallError, InvalidCall
from verl_tool.servers.tools.workspace import text_edits
from verl_tool.servers.tools.workspace.edits import MAX_STORED_BYTES, Editor, Edits

LARGE = b"\n" * text_edits.MAX_BYTES


def test_edits_are_taken_back_in_turn_and_old_ones_let_go() -> None:
    edits = Edits(None)  # type: ignore[arg-type]
    edits.add("f", None, b"1")
    edits.add("f", b"1", b"2")
    assert edits.last("f").before == b"1"
    edits.forget(edits.last("f"))
    assert edits.last("f").before is None
    edits.forget(edits.last("f"))
    with pytest.raises(CallError, match="there is no edit of f"):
        edits.last("f")
    noise = Random(0).randbytes(MAX_STORED_BYTES // 2)
    for number in range(3):
        edits.add(str(number), noise, b"")
    with pytest.raises(CallError):
        edits.last("0")
    assert edits.last("2").before == noise


async def test_a_large_file_is_edited_apart() -> None:
    editor = Editor()
    with longest_callback() as longest:
        shown = await editor.run("view", LARGE, "f", None, 1000, seconds=30.0)
        with pytest.raises(CallError, match="Multiple occurrences"):
            await editor.run("replace", LARGE, "f", "\n", "x", 1000, seconds=30.0)
        with pytest.raises(InvalidCall, match="view_range"):
            await editor.run("view", LARGE, "f", [0], 1000, seconds=30.0)
    editor.close()
    assert shown.startswith("     1\t\n")
    assert longest[0] < MAX_CALLBACK_SECONDS


async def test_an_edit_that_takes_too_long_is_stopped_and_the_next_one_runs() -> None:
    editor = Editor()
    with pytest.raises(CallError, match=r"more than 0\.001 seconds"):
        await editor.run("view", LARGE, "f", None, 1000, seconds=0.001)
    assert await editor.run("view", b"a" * 100_000, "f", None, 100, seconds=30.0)
    editor.close()


async def test_a_cancelled_edit_leaves_nothing_running() -> None:
    editor = Editor()
    task = asyncio.ensure_future(editor.run("view", LARGE, "f", None, 1000, seconds=30.0))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 5.0
    assert await editor.run("view", b"a" * 100_000, "f", None, 100, seconds=30.0)
    editor.close()
