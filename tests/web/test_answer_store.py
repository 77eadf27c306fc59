"""Answers that are kept on disk."""

from __future__ import annotations

import asyncio
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from verl_tool.errors import StartError
from verl_tool.web.answer_store import AnswerStore, NotRecorded

REQUEST = {"search": "serper", "query": "höhe"}


class Asked:
    """Counts how often it is asked."""

    def __init__(self, answer: Any = "found", seconds: float = 0.0) -> None:
        self.times = 0
        self._answer, self._seconds = answer, seconds

    async def __call__(self) -> Any:
        self.times += 1
        await asyncio.sleep(self._seconds)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def opened(folder: Path | None, **options: Any) -> AnswerStore:
    store = AnswerStore(folder, **options)
    store.start()
    return store


def recording_in(folder: Path) -> Path:
    [file] = folder.glob("*/*.json")
    return file


async def test_what_one_store_was_answered_the_next_one_finds(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    answer = [{"text": "größer", "n": 1, "half": "\ud800"}]
    await opened(folder).answer(REQUEST, Asked(answer))
    asked = Asked()
    found = await opened(folder).answer(dict(reversed(REQUEST.items())), asked)
    assert (found[0]["text"], asked.times) == ("größer", 0)
    assert await opened(folder).answer({**REQUEST, "query": "other"}, asked) == "found"


async def test_those_who_ask_at_one_time_share_one_request_and_one_that_leaves_does_not_end_it() -> None:
    asked, store = Asked(seconds=0.2), opened(None)
    first = asyncio.create_task(store.answer(REQUEST, asked))
    others = [asyncio.create_task(store.answer(REQUEST, asked)) for _ in range(8)]
    await asyncio.sleep(0.05)
    first.cancel()
    assert await asyncio.gather(*others) == ["found"] * 8
    assert await store.answer(REQUEST, asked) == "found"
    assert asked.times == 1


async def test_a_failure_is_not_kept_and_close_ends_what_is_asked(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="no"):
        await store.answer(REQUEST, Asked(ValueError("no")))
    assert await store.answer(REQUEST, Asked()) == "found"
    waiting = asyncio.create_task(store.answer({"query": "slow"}, Asked(seconds=60)))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_is_too_old_or_cut_off_is_asked_again_and_replay_asks_nothing(tmp_path: Path) -> None:
    await opened(tmp_path).answer(REQUEST, Asked("old"))
    file = recording_in(tmp_path)
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps({**recorded, "time": time.time() - 100}))
    assert await opened(tmp_path, max_age_seconds=1000).answer(REQUEST, Asked("new")) == "old"
    assert await opened(tmp_path, max_age_seconds=10, replay=True).answer(REQUEST, Asked("new")) == "old"
    assert await opened(tmp_path, max_age_seconds=10).answer(REQUEST, Asked("new")) == "new"
    file.write_text(file.read_text()[:20])
    asked = Asked("newer")
    with pytest.raises(NotRecorded, match=r'no answer is recorded for \{"query": "höhe", "search": "serper"\}'):
        await opened(tmp_path, replay=True).answer(REQUEST, asked)
    assert asked.times == 0
    assert await opened(tmp_path).answer(REQUEST, asked) == "newer"


async def test_an_answer_that_cannot_be_written_is_given_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path / "a")
    (tmp_path / "a").rmdir()
    assert await store.answer(REQUEST, Asked()) == "found"
    assert "cannot be written" in caplog.text


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"the cache .*file cannot be written"):
        opened(tmp_path / "file")
    with pytest.raises(StartError, match="there is no folder"):
        opened(tmp_path / "none", replay=True)


def _write_and_read(folder: str, number: int) -> int:
    async def all_of_them() -> int:
        right = 0
        for n in range(40):
            store = opened(Path(folder))
            found = await store.answer({"n": n % 5}, Asked({"n": n % 5, "text": "x" * 20_000, "by": number}))
            right += found["n"] == n % 5 and len(found["text"]) == 20_000
        return right

    return asyncio.run(all_of_them())


def test_many_processes_share_one_folder(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        done = pool.map(_write_and_read, [str(tmp_path)] * 4, range(4), timeout=60)
        assert list(done) == [40] * 4
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5, "no file is left half written"
    assert all(os.stat(path).st_size > 20_000 for path in files)
