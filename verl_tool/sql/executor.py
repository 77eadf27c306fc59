"""Runs queries in processes of their own (`read_only_process`), each within a time and an amount of memory."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_tool.errors import ConfigError, SandboxError, ToolFault, VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.util.json_lines_process import ask_process, kill_process, read_answer

log = logging.getLogger(__name__)

Match = Literal["set", "bag", "ordered"]
_PROGRAM = Path(__file__).with_name("read_only_process.py")
_START_SECONDS = 60.0
"""For a new process on a machine under load."""
_OPEN_SECONDS = 30.0
"""To open a file, on a slow disk say."""
_CLOCK, _CLOCK_SECONDS = 4.0, 10.0
"""A query may take so many times its CPU time on the clock, and so many seconds: the machine may be busy."""
_LONGEST_LINE = 16 << 20
"""Bytes of one answer."""


class QueryError(VerlToolError):
    """The query failed by the doing of who wrote it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """``sql``, ``refused``, ``time``, ``memory``, ``rows`` or ``crash``."""


@dataclass(frozen=True)
class SqlRows:
    """The beginning of a result."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Values as texts."""
    more: bool
    """There are rows beyond these."""
    statements: tuple[str, ...] = ()
    """Of a schema: what made its tables."""


@dataclass(frozen=True)
class Digest:
    """A whole result in a few bytes: equal for results that match."""

    digest: str
    rows: int
    """Rows; distinct ones if they match as a set."""
    reads_tables: bool
    """Whether the query reads any table of the database."""


@dataclass(frozen=True)
class TableView:
    """How much of a result is shown."""

    rows: int = 50
    cell_chars: int = 200
    chars: int = 8000
    """Characters of all values together."""


class SqlExecutor:
    """At most `processes` queries at a time. Belongs to the event loop of its first use.

    `seconds`: CPU time of one query; on the clock it may take `_CLOCK` times as much and `_CLOCK_SECONDS`.
    `memory_bytes`: of SQLite's heap, and of the process beyond what it has at its start. `queue_seconds`: a query that
    has found no place after it is the fault ``overloaded``.
    """

    def __init__(self, processes: int | None, seconds: float, memory_bytes: int, queue_seconds: float = 30.0) -> None:
        self._seconds, self._memory_bytes, self._queue_seconds = seconds, memory_bytes, queue_seconds
        self._most = processes or max(4, 2 * (os.cpu_count() or 1))
        self._places = asyncio.Semaphore(self._most)
        self._idle: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start one process, to see that it can be. Raises SandboxError."""
        self._idle.append(await self._started())

    async def rows(self, path: Path, query: str, view: TableView) -> SqlRows:
        """The first rows of a query. Raises QueryError, ConfigError if the file is no database, SandboxError, or
        ToolFault if there is no place."""
        return _rows(await self._request(path, {"task": "rows", "query": query, **vars(view)}))

    async def schema(self, path: Path, table: str, view: TableView) -> SqlRows:
        """The statements that made all tables, or those of one and its first rows. Raises as `rows`."""
        return _rows(await self._request(path, {"task": "schema", "table": table, **vars(view)}))

    async def digest(self, path: Path, query: str, match: Match) -> Digest:
        """The whole result, to be compared with another's. Raises as `rows`."""
        description = await self._request(path, {"task": "digest", "query": query, "match": match})
        return Digest(description["digest"], description["rows"], description["reads_tables"])

    async def close(self) -> None:
        """End the processes. They end with this one in any case."""
        while self._idle:
            await kill_process(self._idle.pop())

    async def _request(self, path: Path, task: Mapping[str, Any]) -> dict[str, Any]:
        try:
            await asyncio.wait_for(self._places.acquire(), self._queue_seconds)
        except asyncio.TimeoutError:
            message = f"{self._most} queries run, and none ended within {self._queue_seconds:g} s; raise 'workers'"
            raise ToolFault(FaultKind.OVERLOADED, message, retryable=True) from None
        try:
            process = self._idle.pop() if self._idle else await self._started()
            sound = False
            try:
                description = await self._answered(process, {"path": str(path), "seconds": self._seconds, **task})
                sound = not description.pop("worn", False)
            finally:
                if sound:
                    self._idle.append(process)
                else:  # also after a cancellation: it may still be at work
                    await kill_process(process)
        finally:
            self._places.release()
        if "broken" in description:
            raise ConfigError(description["broken"])
        if "error" in description:
            raise QueryError(description["error"], description["message"])
        return description

    async def _answered(self, process: asyncio.subprocess.Process, question: Mapping[str, Any]) -> dict[str, Any]:
        """The result. What befalls the process once the file is open is the query's doing; before, SandboxError."""
        try:
            opened = await asyncio.wait_for(ask_process(process, question), _OPEN_SECONDS)
        except (asyncio.TimeoutError, OSError, ValueError) as error:
            raise SandboxError(f"the process that runs SQL does not answer: {error!r}") from error
        if "opened" not in opened:
            return opened
        try:
            return await asyncio.wait_for(read_answer(process), _CLOCK * self._seconds + _CLOCK_SECONDS)
        except asyncio.TimeoutError:
            return {"error": "time", "message": "timed out", "worn": True}
        except (OSError, ValueError) as error:
            if process.returncode == -signal.SIGPROF:
                return {"error": "time", "message": "timed out", "worn": True}
            log.info("a query ended the process that ran it: %s", error)
            return {"error": "crash", "message": "the query ended the process that ran it", "worn": True}

    async def _started(self) -> asyncio.subprocess.Process:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_PROGRAM), str(self._memory_bytes)),
            stdin=pipe,
            stdout=pipe,
            stderr=null,
            env={},
            cwd="/",
            limit=_LONGEST_LINE,
        )
        try:
            await asyncio.wait_for(read_answer(process), _START_SECONDS)
        except (asyncio.TimeoutError, OSError, ValueError) as error:
            await kill_process(process)
            raise SandboxError(f"the process that runs SQL does not start: {error!r}") from error
        except BaseException:
            await kill_process(process)
            raise
        return process


def _rows(told: Mapping[str, Any]) -> SqlRows:
    return SqlRows(
        tuple(told.get("columns", ())),
        tuple(map(tuple, told.get("rows", ()))),
        bool(told.get("more")),
        tuple(told.get("statements", ())),
    )
