"""What a training's processes are forked from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl_tool.platforms.preload.processes import ADDRESS, Process
from verl_tool.platforms.preload.template import template

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="for Linux")]


def draw(file: str) -> None:
    """In a child: an id such as each Ray worker draws when it starts."""
    from ray import ObjectID

    Path(file).write_text(ObjectID.from_random().hex())


def test_forked_processes_draw_ids_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a worker dies of the object of another that starts at the same moment, and the training waits for it."""
    pytest.importorskip("verl")
    pytest.importorskip("vllm")
    monkeypatch.delenv(ADDRESS, raising=False)
    files = [tmp_path / name for name in "abc"]
    with template({}):
        children = [Process(target=draw, args=(str(file),)) for file in files]
        for child in children:
            child.start()
        for child in children:
            child.join(100)
    assert len({file.read_text() for file in files}) == 3
