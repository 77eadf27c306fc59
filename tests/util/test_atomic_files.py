"""A reader sees the old file or the new one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from verl_tool.util.atomic_files import atomic_write


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as draft:
            draft.write_text("ne")
            assert path.read_text() == "old"
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_draft_is_none_of_the_files_that_readers_look_for(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "step_1.jsonl") as draft:
        draft.write_text("{}")
        assert list(tmp_path.glob("*.jsonl")) == []
    assert [each.name for each in tmp_path.glob("*.jsonl")] == ["step_1.jsonl"]


def test_threads_that_write_the_same_file_do_not_share_a_draft(tmp_path: Path) -> None:
    both, drafts = threading.Barrier(2), set()

    def write(text: str) -> None:
        with atomic_write(tmp_path / "a") as draft:
            drafts.add(draft)
            draft.write_text(text)
            both.wait(10)

    threads = [threading.Thread(target=write, args=(text * 1000,)) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(drafts) == 2
    assert (tmp_path / "a").read_text() in ("a" * 1000, "b" * 1000)
