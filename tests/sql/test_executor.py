"""The executor, its processes and hostile SQL, on real files."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio
from databases import make_singers

from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sql.executor import QueryError, SqlExecutor, TableView

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SECONDS = 0.5
MEGABYTES = 64


@pytest.fixture(scope="module")
def singers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_singers(tmp_path_factory.mktemp("databases"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncIterator[SqlExecutor]:
    made = SqlExecutor(1, SECONDS, MEGABYTES << 20)
    await made.start()
    yield made
    await made.close()


async def rows(executor: SqlExecutor, path: Path, query: str, **view: int) -> list[tuple[str, ...]]:
    return list((await executor.rows(path, query, TableView(**view))).rows)


async def test_rows_are_texts(executor: SqlExecutor, singers: Path) -> None:
    result = await executor.rows(
        singers, "select name, age, height, x'00ff' as b from singer order by id;", TableView()
    )
    assert result.columns == ("name", "age", "height", "b")
    assert result.rows[:2] == (("Ann", "31", "1.5", "x'00ff'"), ("Bob", "24", "NULL", "x'00ff'"))
    assert not result.more


async def test_rows_and_values_are_cut_while_they_are_read(executor: SqlExecutor, singers: Path) -> None:
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select i, printf('%.50c', 'x') from n"
    result = await executor.rows(singers, endless, TableView(rows=2, cell_chars=10))
    assert result.rows == (("1", "xxxxxxxxxx… (50 characters)"), ("2", "xxxxxxxxxx… (50 characters)"))
    assert result.more
    few = await executor.rows(singers, endless, TableView(rows=1000, cell_chars=10, chars=100))
    assert 0 < len(few.rows) < 5
    [[blob]] = await rows(executor, singers, "select zeroblob(100)", cell_chars=10)
    assert blob == "x'0000000000'… (100 bytes)"
    assert await rows(executor, singers, "select 'a' || char(10) || 'b'") == [("a\\nb",)]


async def test_text_that_is_not_utf_8(executor: SqlExecutor, singers: Path) -> None:
    assert await rows(executor, singers, "select cast(x'61ff62' as text)") == [("a\ufffdb",)]


async def test_the_schema_and_one_table_of_it(executor: SqlExecutor, singers: Path) -> None:
    everything = await executor.schema(singers, "", TableView())
    assert [statement.split(" (")[0] for statement in everything.statements] == [
        "CREATE TABLE singer",
        "CREATE TABLE concert",
        "CREATE VIRTUAL TABLE note using fts5",
        "CREATE VIEW young as select name from singer where age < 30",
    ]
    one = await executor.schema(singers, "SINGER", TableView(rows=1))
    assert [statement.split(" (")[0] for statement in one.statements] == [
        "CREATE TABLE singer",
        "CREATE INDEX by_age on singer",
    ]
    assert (one.columns, one.rows, one.more) == (("id", "name", "age", "height"), (("1", "Ann", "31", "1.5"),), True)
    with pytest.raises(QueryError, match='no such table: x"; drop; known: singer, concert, note, young'):
        await executor.schema(singers, 'x"; drop', TableView())


READING = {
    "pragma table_info(singer)": 4,
    "select * from pragma_table_info('singer')": 4,
    "pragma foreign_key_list(concert)": 1,
    "explain query plan select * from singer where age = 1": 1,
    "select name from sqlite_master where type = 'index'": 1,
    "values (1), (2)": 2,
    "with a as (select 1) select * from a": 1,
    "select value from json_each('[1, 2, 3]')": 3,
    "select name from young": 2,
    "select highlight(note, 0, '[', ']') from note where note match 'loud'": 1,
    "-- a comment\nselect 1; -- another": 1,
}


@pytest.mark.parametrize("query", READING)
async def test_what_only_reads_is_run(executor: SqlExecutor, singers: Path, query: str) -> None:
    assert len(await rows(executor, singers, query)) == READING[query]


REFUSED = {
    "attach 'x.db' as x": "ATTACH",
    "attach ':memory:' as x": "ATTACH",
    "detach main": "DETACH",
    "insert into singer (name) values ('x')": "INSERT",
    "update singer set age = 1": "UPDATE",
    "update sqlite_master set name = 'x'": "may not be modified",
    "insert into note (note) values ('optimize')": "INSERT",
    "delete from singer": "DELETE",
    "replace into singer (id, name) values (1, 'x')": "INSERT",
    "with a as (select 1) insert into concert select *, 1 from a": "INSERT",
    "create table x (a)": "INSERT",
    "create temp table x (a)": "INSERT",
    "create view x as select 1": "INSERT",
    "create trigger x after insert on singer begin select 1; end": "CREATE TRIGGER",
    "create virtual table x using fts5 (a)": "INSERT",
    "create virtual table temp.x using fts3 (a)": "INSERT",
    "drop table singer": "DELETE",
    "alter table singer add column x": "is not allowed",
    "reindex": "REINDEX",
    "analyze": "is not allowed",
    "vacuum": "",
    "vacuum into 'copy.db'": "",
    "begin": "TRANSACTION",
    "savepoint x": "SAVEPOINT",
    "pragma journal_mode=wal": "PRAGMA journal_mode",
    "pragma query_only=0": "PRAGMA query_only",
    "pragma writable_schema=1": "PRAGMA writable_schema",
    "pragma hard_heap_limit=0": "PRAGMA hard_heap_limit",
    "pragma temp_store_directory='/tmp'": "PRAGMA temp_store_directory",
    "select * from pragma_integrity_check": "",
    "select load_extension('/tmp/x.so')": "load_extension",
    "select fts3_tokenizer('simple')": "fts3_tokenizer",
    "select readfile('/etc/passwd')": "",
    "select writefile('x', 'y')": "",
    "select 1; select 2": "one statement",
    "select 1; drop table singer": "one statement",
    "select ?": "",
    "selec 1": "syntax error",
    "select \0 1": "",
    "select '\ud800'": "",
    "select * from no_such_table": "no such table",
    "": "",
}


async def failure(executor: SqlExecutor, path: Path, query: str) -> tuple[str, str]:
    """The kind of failure and its words; empty if there is none."""
    try:
        await rows(executor, path, query)
    except QueryError as error:
        return error.kind, str(error)
    return "", ""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("query", REFUSED)
async def test_what_does_more_than_read_is_refused(executor: SqlExecutor, singers: Path, query: str) -> None:
    before = contents(singers.parent)
    kind, words = await failure(executor, singers, query)
    assert kind in ("sql", "refused") or query in ("", "vacuum")
    assert REFUSED[query] in words
    assert contents(singers.parent) == before


BOMBS = {
    "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n": {"time"},
    "with recursive n(i) as (select 1 union select i + 1 from n) select max(i) from n": {"time", "memory"},
    "with recursive n(i) as (select 'x' union all select i || i from n) select i from n": {"sql", "memory", "time"},
    "select count(*) from sqlite_master a, sqlite_master b, (with recursive n(i) as (select 1 union all select i + 1 "
    "from n limit 100000) select * from n) c, (select 1 union select 2) d, singer e, singer f, singer g, singer h, "
    "singer i, singer j, singer k": {"time"},
    "select zeroblob(1000000000)": {"sql", "memory"},
    "select hex(randomblob(1000000000))": {"sql", "memory"},
    "select length(zeroblob(8000000) || zeroblob(8000000))": {"sql", "memory"},
    "select printf('%1000000000d', 1)": {"", "sql", "memory"},
    "select replace(hex(zeroblob(1000000)), '0', hex(zeroblob(1000)))": {"sql", "memory"},
    "select group_concat(a) from (with recursive n(i, a) as (select 1, hex(zeroblob(1000)) union all select i + 1, a "
    "from n) select a from n)": {"sql", "memory", "time"},
    "with recursive n(i, a) as (select 1, zeroblob(4000000) union all select i + 1, zeroblob(4000000 + i) from n) "
    "select * from n order by i desc": {"memory", "time"},
    f"select {'(' * 5000}1{')' * 5000}": {"sql"},
    f"select {'- ' * 20000}1": {"sql"},
    f"select {'1+' * 5000}1": {"sql"},
    f"select {'not ' * 5000}1": {"sql"},
    " union all ".join(["select 1"] * 5000): {"sql"},
    f"select {', '.join(['1'] * 5000)}": {"sql"},
    f"select '{'x' * 200_000}'": {"sql"},
    "select 'a' like '" + "%a" * 3000 + "b'": {"sql"},
    "select instr(hex(zeroblob(2000000)), hex(zeroblob(999000)) || '1')": {"time", "sql", "memory"},
    "select count(*) from (select 1 where '" + "a" * 900 + "' glob '" + "*a" * 400 + "b')": {"", "time", "sql"},
}


@pytest.mark.parametrize("query", BOMBS, ids=lambda query: query[:50])
async def test_a_bomb_costs_its_own_time_and_memory_only(executor: SqlExecutor, singers: Path, query: str) -> None:
    kind, words = await failure(executor, singers, query)
    assert kind in BOMBS[query], words
    assert await rows(executor, singers, "select count(*) from singer") == [("3",)]


async def test_a_process_that_is_killed_is_replaced(executor: SqlExecutor, singers: Path) -> None:
    waiting = asyncio.create_task(
        executor.rows(
            singers, "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n", TableView()
        )
    )
    [process] = executor._idle
    await asyncio.sleep(0.2)
    process.kill()
    with pytest.raises(QueryError, match="ended the process"):
        await waiting
    assert await rows(executor, singers, "select 1") == [("1",)]


async def test_the_process_has_no_environment_and_can_write_nothing(executor: SqlExecutor, singers: Path) -> None:
    await rows(executor, singers, "select 1")
    [process] = executor._idle
    folder = Path(f"/proc/{process.pid}")
    assert folder.joinpath("environ").read_bytes() == b""
    limits = folder.joinpath("limits").read_text("ascii")
    assert any(line.startswith("Max file size") and line.split()[3] == "0" for line in limits.splitlines())
    status = folder.joinpath("status").read_text("ascii")
    assert "NoNewPrivs:\t1" in status


async def test_what_is_no_database_is_no_querys_fault(executor: SqlExecutor, tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("no database\n" * 1000)
    for path in (text, tmp_path / "no_such.sqlite"):
        with pytest.raises(ConfigError, match=f"{path} cannot be read as a SQLite database"):
            await executor.rows(path, "select 1", TableView())


async def test_a_name_that_is_no_plain_uri(executor: SqlExecutor, tmp_path: Path) -> None:
    path = make_singers(tmp_path, "a?mode=rw#%41 b", folder=False)
    assert await rows(executor, path, "select count(*) from singer") == [("3",)]


async def test_a_read_only_file_in_a_read_only_folder(executor: SqlExecutor, tmp_path: Path) -> None:
    path = make_singers(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma journal_mode=wal")
    os.chmod(path, 0o400)
    os.chmod(path.parent, 0o500)
    assert await rows(executor, path, "select count(*) from singer") == [("3",)]
    assert list(contents(path.parent)) == [path.name]
    os.chmod(path.parent, 0o700)


MATCHES = {
    "set": ("select age from singer order by age", "select distinct age from singer order by age desc"),
    "bag": ("select age from singer order by age", "select age + 0.0 from singer order by age desc"),
    "ordered": ("select age from singer order by age", "select age + 0.0 from singer order by age asc"),
}
DIFFERS = {
    "set": "select age from singer union select 0",
    "bag": "select distinct age from singer",
    "ordered": "select age from singer order by age desc",
}


@pytest.mark.parametrize("match", MATCHES)
async def test_results_are_compared(executor: SqlExecutor, singers: Path, match: str) -> None:
    one, same = [await executor.digest(singers, query, match) for query in MATCHES[match]]
    other = await executor.digest(singers, DIFFERS[match], match)
    assert one == same
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("select 1", "select 1.0", True),
        ("select 1", "select '1'", False),
        ("select null", "select ''", False),
        ("select null", "select 0", False),
        ("select -0.0", "select 0", True),
        ("select 9007199254740993", "select 9007199254740992.0", False),
        ("select 1e999", "select 1e999", True),
        ("select x'61'", "select 'a'", False),
        ("select 'ab', 'c'", "select 'a', 'bc'", False),
        ("select 'a', 'b'", "select 'ab'", False),
        ("select 1 as a", "select 1 as b", True),
        ("select 1, 2", "select 2, 1", False),
        ("select cast(x'ff' as text)", "select cast(x'fe' as text)", False),
        ("select 0.1 + 0.2", "select 0.3", False),
    ],
)
async def test_values_are_compared_exactly(
    executor: SqlExecutor, singers: Path, one: str, other: str, equal: bool
) -> None:
    found = [(await executor.digest(singers, query, "set")).digest for query in (one, other)]
    assert (found[0] == found[1]) == equal


async def test_a_result_tells_whether_it_came_from_a_table(executor: SqlExecutor, singers: Path) -> None:
    for query, reads in {
        "select 3": False,
        "select value from json_each('[3]')": False,
        "select count(*) from sqlite_master": False,
        "select count(*) from singer": True,
        "select name from young": True,
    }.items():
        assert (await executor.digest(singers, query, "set")).reads_tables is reads, query


async def test_rows_that_are_alike_cost_a_set_nothing(singers: Path) -> None:
    many = "with recursive n(i) as (select 1 union all select i + 1 from n limit 210000) select 1 from n"
    patient = SqlExecutor(1, 20.0, MEGABYTES << 20)
    try:
        assert (await patient.digest(singers, many, "set")).rows == 1
        with pytest.raises(QueryError, match="more than 200000 rows"):
            await patient.digest(singers, many, "bag")
    finally:
        await patient.close()


async def test_who_finds_no_place_is_told_so(singers: Path) -> None:
    executor = SqlExecutor(1, SECONDS, MEGABYTES << 20, queue_seconds=0.1)
    slow = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    try:
        first, second = await asyncio.gather(
            *(executor.rows(singers, slow, TableView()) for _ in range(2)), return_exceptions=True
        )
    finally:
        await executor.close()
    assert isinstance(first, QueryError)
    assert isinstance(second, ToolFault)
    assert (second.kind, second.retryable) == (FaultKind.OVERLOADED, True)
