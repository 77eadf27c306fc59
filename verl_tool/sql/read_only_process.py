"""The process that runs queries, one after the other: questions and answers are lines of JSON on stdin and stdout.

Run as a program by `verl_tool.sql.executor`, with the standard library only. What keeps a query from doing harm:

- The file is opened with ``mode=ro`` and ``immutable=1``: SQLite itself cannot write it, and makes no file beside it.
- An authorizer lets a statement read tables, call functions and look at the schema by pragma, and nothing else.
- A progress handler ends it when it has used its CPU time; if one step takes longer, a timer of the kernel ends the
  process (SIGPROF). On the clock it may take longer on a busy machine, up to what whoever started the process allows.
- Strings, blobs, statements and the heap are bounded in SQLite, the address space by the kernel.
- The process may write no file, and has no environment.

A question is ``{"path", "seconds", "task", …}``. Two answers follow: ``{"opened": true}``, or ``{"broken": why}`` if
the file cannot be read, which ends it; then the result, or ``{"error": kind, "message": words}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from urllib.parse import quote

STEPS = 1000
"""Instructions of SQLite's virtual machine between two looks at the clock."""
GRACE_SECONDS = 0.5
"""CPU time beyond its own that a query gets before the kernel ends the process."""
LONGEST_VALUE = 8 << 20
"""Bytes of a string, a blob or a row."""
LONGEST_STATEMENT = 100_000
"""Bytes."""
MAX_ROWS = 200_000
"""Rows of a result that is compared; distinct ones if it is compared as a set."""
_LIMITS = {
    "SQLITE_LIMIT_LENGTH": LONGEST_VALUE,
    "SQLITE_LIMIT_SQL_LENGTH": LONGEST_STATEMENT,
    "SQLITE_LIMIT_ATTACHED": 0,
    "SQLITE_LIMIT_LIKE_PATTERN_LENGTH": 1000,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
    "SQLITE_LIMIT_WORKER_THREADS": 0,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {
    *("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"),
    *("collation_list", "compile_options", "data_version"),
}
"""Pragmas that tell of the database and change nothing; ``database_list`` would tell where it is on this machine. The
last is what full-text tables ask for."""
_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "lsdir"}
"""Functions that reach outside of the database, or may in some builds."""
_OF_SQLITE = ("sqlite_", "pragma_", "json_each", "json_tree")
"""How tables begin that no database brings along."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_SPARE_BYTES = 64 << 20
"""Address space for Python's own values."""

Answer = dict[str, Any]


class StatementRejected(Exception):
    """What the authorizer did not let a statement do."""


class ResultReader:
    """One connection to one file, for one statement."""

    def __init__(self, path: str, seconds: float, text: Callable[[bytes], str]) -> None:
        """Raises sqlite3.Error if the file cannot be read."""
        self._deadline = time.process_time() + seconds
        self.refused = ""
        """The first thing that was not allowed."""
        self.reads_tables = False
        """Whether the statement reads a table of the database, not of SQLite's own."""
        uri = f"file:{quote(path)}?mode=ro&immutable=1"
        self.connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        self.connection.text_factory = text
        for pragma in ("query_only=1", "trusted_schema=0", "temp_store=memory", "mmap_size=0", "cell_size_check=1"):
            self.connection.execute(f"pragma {pragma}")
        self.connection.execute("select count(*) from sqlite_master").fetchone()
        if sys.version_info >= (3, 11):
            for name, value in _LIMITS.items():
                self.connection.setlimit(getattr(sqlite3, name), value)
        self.connection.set_progress_handler(self._is_late, STEPS)
        self.connection.set_authorizer(self._may)

    def __enter__(self) -> ResultReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def run(self, query: str) -> sqlite3.Cursor:
        """The cursor of one statement. Raises Refused, or what sqlite3 raises."""
        try:
            return self.connection.execute(query)
        except sqlite3.Error as error:
            if self.refused and not self._is_late():
                raise StatementRejected(self.refused) from error
            raise

    def _is_late(self) -> int:
        return int(time.process_time() > self._deadline)

    def _may(
        self, action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
    ) -> int:
        if action in _READING:
            if action == sqlite3.SQLITE_READ and first and not first.startswith(_OF_SQLITE):
                self.reads_tables = True
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _FUNCTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PRAGMAS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            # SQLite asks so when it first meets a virtual table; a statement that means it is refused by itself.
            return sqlite3.SQLITE_OK
        self.refused = self.refused or _named(action, first, second)
        return sqlite3.SQLITE_DENY


_ACTIONS = {
    value: name.removeprefix("SQLITE_")
    for name, value in vars(sqlite3).items()
    if name.startswith(("SQLITE_CREATE_", "SQLITE_DROP_", "SQLITE_ALTER_"))
    or name
    in (
        *("SQLITE_DELETE", "SQLITE_INSERT", "SQLITE_UPDATE", "SQLITE_PRAGMA", "SQLITE_TRANSACTION", "SQLITE_SAVEPOINT"),
        *("SQLITE_ATTACH", "SQLITE_DETACH", "SQLITE_REINDEX", "SQLITE_ANALYZE", "SQLITE_FUNCTION"),
    )
}


def _named(action: int, first: str | None, second: str | None) -> str:
    """What was not allowed, in words."""
    name = _ACTIONS.get(action, "this").replace("_", " ")
    if action == sqlite3.SQLITE_PRAGMA:
        return f"PRAGMA {first}"
    return f"the function {second}" if action == sqlite3.SQLITE_FUNCTION else name


def rows(question: Answer) -> Answer:
    """The first rows, for a reader: ``{"columns", "rows", "more"}``; each value is a text."""
    with _opened(question) as reader:
        return _format(reader.run(question["query"]), question)


def schema(question: Answer) -> Answer:
    """What the database holds: ``{"statements": […]}``, and of one table its first rows as `rows` has them."""
    with _opened(question) as reader:
        found = reader.run(
            "select name, sql, tbl_name, type from sqlite_master where sql is not null and name not like 'sqlite\\_%' "
            "escape '\\' order by rowid"
        ).fetchall()
        inner = tuple(f"{name}_" for name, sql, _, _ in found if sql.lower().startswith("create virtual"))
        visible = [row for row in found if row[3] in ("table", "view") and not row[0].startswith(inner or ("\0",))]
        tables = {name.lower(): name for name, *_ in visible}
        requested = question["table"]
        if not requested:
            return {"statements": _first([sql for _, sql, *_ in visible], question)}
        if requested.lower() not in tables:
            known = ", ".join(_first(list(tables.values()), question))
            return {"error": "sql", "message": f"no such table: {requested[:200]}; known: {known}"}
        name = tables[requested.lower()]
        own = _first([sql for _, sql, table, _ in found if table == name], question)
        quoted = name.replace('"', '""')
        return {"statements": own} | _format(reader.run(f'select * from "{quoted}"'), question)


def digest(question: Answer) -> Answer:
    """A result in a few bytes, to be compared with another: ``{"digest", "rows", "reads_tables"}``.

    `match`: ``set`` tells neither order nor repetition, ``bag`` no order, ``ordered`` everything. Numbers are equal by
    value, as in Python: 1 and 1.0. The names of columns do not count.
    """
    match, maximum = question["match"], MAX_ROWS
    with _opened(question, exact=True) as reader:
        hashes = map(_hash_of, reader.run(question["query"]))
        stored = _distinct(hashes, maximum) if match == "set" else list(islice(hashes, maximum + 1))
        if len(stored) > maximum:
            return {
                "error": "rows",
                "message": f"the result has more than {maximum} {'distinct ' * (match == 'set')}rows",
            }
        ordered = stored if match == "ordered" else sorted(stored)
        total = hashlib.blake2b(b"".join(ordered), digest_size=32).hexdigest()
        return {"digest": total, "rows": len(stored), "reads_tables": reader.reads_tables}


def _opened(question: Answer, exact: bool = False) -> ResultReader:
    """Tells that the file could be opened, or raises `_Broken`."""
    errors = "surrogateescape" if exact else "replace"
    try:
        reader = ResultReader(question["path"], question["seconds"], lambda data: data.decode("utf-8", errors))
    except (sqlite3.Error, OSError) as error:
        raise _Broken(f"{question['path']} cannot be read as a SQLite database: {error}") from error
    _report({"opened": True})
    return reader


class _Broken(Exception):
    """The file is no database that can be read."""


def _format(cursor: sqlite3.Cursor, question: Answer) -> Answer:
    columns = [str(column[0])[: question["cell_chars"]] for column in cursor.description or ()]
    stored: list[list[str]] = []
    remaining = question["chars"]
    for row in cursor:
        cells = [_cell(value, question["cell_chars"]) for value in row]
        remaining -= sum(map(len, cells)) + len(cells)
        if len(stored) == question["rows"] or remaining < 0:
            return {"columns": columns, "rows": stored, "more": True}
        stored.append(cells)
    return {"columns": columns, "rows": stored, "more": False}


def _first(texts: Iterable[str], question: Answer) -> list[str]:
    """As many as there is room for, and a mark if some are left out."""
    stored: list[str] = []
    remaining = question["chars"]
    for text in texts:
        remaining -= len(text)
        if remaining < 0:
            return [*stored, "…"]
        stored.append(text)
    return stored


def _cell(value: object, limit: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        visible = f"x'{value[: limit // 2].hex()}'"
        return visible if len(value) <= limit // 2 else f"{visible}… ({len(value)} bytes)"
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text)} characters)"
    return (
        text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") if "\n" in text or "\r" in text else text
    )


def _hash_of(row: tuple[object, ...]) -> bytes:
    one = hashlib.blake2b(digest_size=16)
    for value in row:
        kind, data = _exact(value)
        one.update(b"%b%d:" % (kind, len(data)))
        one.update(data)
    return one.digest()


def _distinct(hashes: Iterable[bytes], most: int) -> list[bytes]:
    """At most one more than `most`."""
    stored: set[bytes] = set()
    for each in hashes:
        stored.add(each)
        if len(stored) > most:
            break
    return list(stored)


def _exact(value: object) -> tuple[bytes, bytes]:
    """A value's kind and bytes; the same for numbers that are equal."""
    if value is None:
        return b"n", b""
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogateescape")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return b"r", repr(value).encode()


def answer(question: Answer) -> Answer:
    """The result of one question. Raises what no query can bring about."""
    try:
        return {"rows": rows, "schema": schema, "digest": digest}[question["task"]](question)
    except _Broken as error:
        return {"broken": str(error)}
    except StatementRejected as error:
        return {"error": "refused", "message": f"the database can only be read; {error} is not allowed"}
    except MemoryError:
        return {"error": "memory", "message": "out of memory"}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return _failure(error)


def _failure(error: Exception) -> Answer:
    words = str(error)
    if isinstance(error, sqlite3.OperationalError) and words == "interrupted":
        return {"error": "time", "message": "timed out"}
    if isinstance(error, sqlite3.Error) and words in ("out of memory", "database or disk is full"):
        return {"error": "memory", "message": "out of memory"}
    return {"error": "sql", "message": words[:1000]}


def _report(what: Answer) -> None:
    _answers.write(json.dumps(what) + "\n")
    _answers.flush()


def _confine(memory_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for kind, maximum in (
        (resource.RLIMIT_AS, memory_bytes + _memory("address space") + _SPARE_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (maximum, maximum))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"pragma hard_heap_limit={memory_bytes}")  # of the whole process


def _memory(kind: str) -> int:
    """Bytes that this process has now, of proc(5)'s ``statm``."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = dict(zip(("address space", "resident"), map(int, file.read().split()), strict=False))
    return pages[kind] * os.sysconf("SC_PAGE_SIZE")


def _questions() -> Iterator[Answer]:
    for line in sys.stdin:
        yield json.loads(line)


def main(memory_bytes: int) -> None:
    """Answer until stdin ends."""
    _confine(memory_bytes)
    _report({"ready": True})
    for question in _questions():
        signal.setitimer(signal.ITIMER_PROF, question["seconds"] + GRACE_SECONDS)
        description = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        worn = _memory("resident") > memory_bytes
        _report(description | {"worn": worn or description.get("error") == "memory"})


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(int(sys.argv[1]))
