"""Store answers of slow or paid services on disk, for many processes and for replay.

Each answer is a file, ``FOLDER/ab/cdef….json``, named by the SHA-256 of its request and written by renaming. Any number
of processes and nodes can use a folder without a lock, also on a network file system. SQLite and libraries based on it,
such as ``diskcache``, allow one writer at a time and are not safe there. A file contains the request and its time, and
may be deleted at any time.
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
"""Number of answers that a process stores in memory, and for how long. An episode that repeats a request soon gets the
same answer."""
log = logging.getLogger(__name__)

Request = Mapping[str, Any]
"""A request as JSON. It must not contain keys or passwords, since it is written to disk."""


class NotRecorded(VerlToolError):
    """No answer to this request was recorded, and the service must not be asked in a replay."""


@dataclass(frozen=True)
class _Remembered:
    answer: Any
    until: float


class AnswerStore:
    """A store of answers, to be used and closed in one event loop.

    `folder` is the folder of answers. With None, they are stored in memory only. An answer older than `max_age_seconds`
    is requested again. With `replay`, all answers come from `folder`, whatever their age.
    """

    def __init__(self, folder: Path | None, max_age_seconds: float | None = None, replay: bool = False) -> None:
        self._folder = folder
        self._max_age = max_age_seconds
        self._replay = replay
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()
        self._asked: dict[str, asyncio.Task[Any]] = {}

    def start(self) -> None:
        """Check that the folder is usable. Raises StartError."""
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
        """Cancel the requests in progress."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, request: Request, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to `request` from the store, or from `ask`. Equal concurrent requests share one `ask`.

        The answer of `ask` must be JSON and is stored. Raises NotRecorded, and the errors of `ask`, which are not
        stored.
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
        # If the first caller is cancelled, the others still get the answer.
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
        """Read a record. None if there is none, it is too old, or it was cut off by a crash of the machine."""
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
            # The caller gets the answer, but it is not stored.
            log.warning("%s cannot be written: %s", path, error)
            new.unlink(missing_ok=True)


def _canonical(request: Request) -> bytes:
    return json.dumps(request, ensure_ascii=False, sort_keys=True).encode("utf-8", "replace")
