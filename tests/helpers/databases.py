"""Small SQLite databases in a folder."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

SINGERS = (("Ann", 31, 1.5), ("Bob", 24, None), ("Cleo", 24, 2.0))
SCRIPT = """
create table singer (id integer primary key, name text not null, age int, height real);
create table concert (singer int references singer (id), "the year" int);
create index by_age on singer (age);
create virtual table note using fts5 (words);
create view young as select name from singer where age < 30;
insert into note values ('a loud voice'), ('a soft voice');
insert into concert values (1, 2014), (1, 2014), (2, 2015);
"""


def make_singers(root: Path, db_id: str = "singers", folder: bool = True) -> Path:
    """Make ``ROOT/ID/ID.sqlite``, or ``ROOT/ID.sqlite`` without `folder`."""
    path = root / db_id / f"{db_id}.sqlite" if folder else root / f"{db_id}.sqlite"
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCRIPT)
        connection.executemany("insert into singer (name, age, height) values (?, ?, ?)", SINGERS)
        connection.commit()
    return path
