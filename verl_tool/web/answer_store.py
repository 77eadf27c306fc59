"""Answers that were paid or waited for once: shared by many processes on disk, and recorded for replay.

One file an answer, ``FOLDER/ab/cdef….json``, named by the SHA-256 of its request and put there by renaming. So any
number of processes and nodes may read and write one folder without a lock, on a network file system too; SQLite, and
libraries over it such as ``diskcache``, have one writer at a time and are not safe there. A file says what was asked
and when, and is removed like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tool.errors import StartError, VerlToolError

REMEMBERED, REMEMBERED_SECONDS = 128, 600.0
"""Answers that a process keeps in memory, and how long: an episode that comes back gets the same one."""
log = logging.getLogger(__name__)

Request = Mapping[str, Any]
"""What was asked, as JSON. It holds no key or password: it is written to disk."""


class NotRecorded(VerlToolError):
    """No answer to this request was recorded, and nothing else may be asked."""


@dataclass(frozen=True)
class _Remembered:
    answer: Any
    until: float


class AnswerStore:
    """Use it in one event loop; `close` it there.

    `folder`: where answers are kept; None keeps them in memory only. `max_age_seconds`: an older answer is asked for
    again. `replay`: answer from `folder` alone, whatever the age.
    """

    def __init__(self, folder: Path | None, max_age_seconds: float | None = None, replay: bool = False) -> None:
        self._folder = folder
        self._max_age = max_age_seconds
        self._replay = replay
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()
        self._asked: dict[str, asyncio.Task[Any]] = {}

    def start(self) -> None:
        """See that the folder can be used. Raises StartError."""
        if self._folder is None:
            return
        if self._replay:
            if not self._folder.is_dir():
                raise StartError(f"replay: there is no folder {self._folder}; record answers into it first")
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f".{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StartError(f"the cache {self._folder} cannot be written: {error}") from error

    async def close(self) -> None:
        """Stop what is being asked."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, request: Request, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to `request`, from here or by `ask`; those who want the same at one time wait for one `ask`.

        What `ask` returns is JSON and is kept; what it raises is not. Raises NotRecorded, and as `ask`.
        """
        key = hashlib.sha256(_canonical(request)).hexdigest()
        found = self._remembered.get(key)
        if found is not None and found.until > time.monotonic():
            return found.answer
        task = self._asked.get(key)
        if task is None:
            task = asyncio.create_task(self._get(key, request, ask))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._done(key, done))
        # Whoever asked first may be cancelled: the others still wait.
        return await asyncio.shield(task)

    async def _get(self, key: str, request: Request, ask: Callable[[], Awaitable[Any]]) -> Any:
        if self._folder is not None:
            recorded = await asyncio.to_thread(self._read, key)
            if recorded is not None:
                return recorded["answer"]
        if self._replay:
            words = f"no answer is recorded for {_canonical(request).decode()}"
            log.warning("replay: %s", words)
            raise NotRecorded(words)
        answer = await ask()
        if self._folder is not None:
            await asyncio.to_thread(self._write, key, request, answer)
        return answer

    def _done(self, key: str, task: asyncio.Task[Any]) -> None:
        self._asked.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._remembered[key] = _Remembered(task.result(), time.monotonic() + REMEMBERED_SECONDS)
        self._remembered.move_to_end(key)
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key[2:]}.json"

    def _read(self, key: str) -> dict[str, Any] | None:
        """What is recorded, unless it is too old or was cut off when a machine went down."""
        path = self._path(key)
        try:
            found = json.loads(path.read_bytes())
            recorded, _ = float(found["time"]), found["answer"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read and is passed over: %s", path, error)
            return None
        too_old = self._max_age is not None and not self._replay and time.time() - recorded > self._max_age
        return None if too_old else found

    def _write(self, key: str, request: Request, answer: Any) -> None:
        path = self._path(key)
        content = json.dumps({"request": request, "time": time.time(), "answer": answer}, ensure_ascii=False)
        new = path.with_name(f".{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True)
            new.write_text(content, encoding="utf-8", errors="replace")
            os.replace(new, path)
        except OSError as error:
            # The answer is there all the same; it is not kept.
            log.warning("%s cannot be written: %s", path, error)
            new.unlink(missing_ok=True)


def _canonical(request: Request) -> bytes:
    return json.dumps(request, ensure_ascii=False, sort_keys=True).encode("utf-8", "replace")
