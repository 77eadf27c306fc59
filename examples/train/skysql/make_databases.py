"""SQLite databases for a tiny model, and questions whose answer one column has: which, only the database tells.

    python examples/train/skysql/make_databases.py --output outputs/databases

Each database has a table of things, with a column for each of three numbers, whose names tell nothing, as those of old
systems: a price stands in ``gamma`` here and in ``tau`` there. The table ``fields`` tells which is which. A database
follows from its id.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

DATA_SOURCE = "made_databases"
TABLES = ("boats", "cats", "dogs", "horses", "houses", "robots", "rocks", "ships", "toys", "trains", "trees", "wagons")
NAMES = (
    *("anna", "bert", "carl", "dora", "emil", "fred", "gina", "hugo", "ida", "jack", "kate", "leo"),
    *("mara", "nina", "otto", "paul", "rosa", "sam", "tina", "ugo", "vera", "will", "yara", "zoe"),
)
KINDS = ("height", "price", "weight")
"""What a question asks for."""
FIELDS = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"),
    *("nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
"""Names of columns."""
ROWS = 5
QUESTIONS = 4
"""Of each database."""


@dataclass(frozen=True)
class Database:
    """One database."""

    db_id: str
    table: str
    columns: dict[str, str]
    """By what they tell of, one of `KINDS`. The first is ``name`` and not here."""
    rows: tuple[tuple[str, ...], ...]
    """A name, and a number for each column; no number is there twice."""

    @classmethod
    def of(cls, db_id: str) -> Database:
        """That of this id."""
        rng = random.Random(db_id)
        columns = dict(zip(KINDS, rng.sample(FIELDS, len(KINDS)), strict=True))
        numbers = iter(rng.sample(range(10, 100), ROWS * len(KINDS)))
        rows = ((name, *(str(next(numbers)) for _ in columns)) for name in rng.sample(NAMES, ROWS))
        return cls(db_id, rng.choice(TABLES), columns, tuple(rows))

    @property
    def questions(self) -> list[Question]:
        """Some, all different."""
        rng = random.Random(f"questions of {self.db_id}")
        asked = [Question(self.table, name, kind) for name, *_ in self.rows for kind in self.columns]
        return rng.sample(asked, QUESTIONS)

    def write(self, folder: Path) -> None:
        """As ``<folder>/<db_id>.sqlite``."""
        with closing(sqlite3.connect(folder / f"{self.db_id}.sqlite", isolation_level=None)) as connection:
            connection.execute("PRAGMA page_size=512")
            connection.execute("PRAGMA journal_mode=off")
            connection.execute("PRAGMA synchronous=off")
            connection.execute("CREATE TABLE fields (about TEXT, field TEXT)")
            connection.executemany("INSERT INTO fields VALUES (?, ?)", self.columns.items())
            columns = ", ".join(f"{column} INTEGER" for column in self.columns.values())
            connection.execute(f"CREATE TABLE {self.table} (name TEXT, {columns})")
            connection.executemany(f"INSERT INTO {self.table} VALUES (?, ?, ?, ?)", self.rows)


@dataclass(frozen=True)
class Question:
    """What the model is asked; it is not told the columns."""

    table: str
    name: str
    kind: str

    @property
    def text(self) -> str:
        """In words."""
        return f"What is the {self.kind} of {self.name} in {self.table}?"

    @classmethod
    def of(cls, text: str) -> Question:
        """From its words."""
        _, _, _, kind, _, name, _, table = text.rstrip("?").split()
        return cls(table, name, kind)

    def query(self, column: str) -> str:
        """What answers it, if that is the column."""
        return f"SELECT {column} FROM {self.table} WHERE name = '{self.name}'"


def look(kind: str) -> str:
    """A query that tells the column of that kind."""
    return f"SELECT * FROM fields WHERE about = '{kind}'"


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder of the databases; questions/ there is made too.")],
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Databases to train on.")] = 256,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out databases.")] = 64,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same databases.")] = 0,
) -> None:
    """Make the databases, and train.jsonl and test.jsonl with their questions."""
    (output / "questions").mkdir(parents=True, exist_ok=True)
    for split, size in (("train", train_size), ("test", test_size)):
        lines = []
        for number in range(size):
            database = Database.of(f"{split}_{seed}_{number}")
            database.write(output)
            lines += [
                {
                    "data_source": DATA_SOURCE,
                    "db_id": database.db_id,
                    "question": question.text,
                    "sql": question.query(database.columns[question.kind]),
                }
                for question in database.questions
            ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (output / "questions" / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
