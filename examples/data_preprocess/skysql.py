"""Questions to be answered by a query, as SkyRL-SQL trains on, for the tool `sql` and the reward manager `sqlcoder`.

    python examples/data_preprocess/skysql.py --databases /data/omnisql

A source's row has `db_id` and either `question` and `sql`, perhaps `schema` and `external_knowledge` too, or verl's
columns with a `prompt` of its own: those of NovaSky-AI/SkyRL-SQL-653-data-newfmt (the query in `reward_spec`) and of
VerlTool/SkyRL-SQL-Reproduction (the id in `extra_info`, the query in `reward_model`). Such a prompt stays as it is.

Two data sets may each have a database of one id. With `--databases` each row's file is looked for below that folder,
where its data set has it, and a link ``<data source>.<id>.sqlite`` to it is made there: that folder is the `root` of
tool and reward manager then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import (
    DatasetPath,
    Limit,
    LocalDir,
    Row,
    RowError,
    Seed,
    TestSize,
    convert,
    divide,
    field,
    has_split,
    load,
    row,
    run,
    save,
)

DATA_SOURCE = "skysql"
FOLDERS = {
    "synsql": ("SynSQL-2.5M/databases", "synsql"),
    "spider": ("spider/database", "spider/test_database"),
    "spider_dk": ("Spider-DK/database",),
}
"""Where OmniSQL's archive, and verl-tool's, have a data source's databases; of others it is spider's test databases."""
OTHER_FOLDERS = ("spider/test_database", "spider/database")
TOOL = """\
You answer questions about a SQLite database. Think between <think> and </think> whenever you have learned something
new. To look at the database, write <sql>one SELECT statement</sql>; its first rows come back between <observation> and
</observation>, with the number of turns that you have left. As soon as you know how, or if no turn is left, write the
query whose result answers the question, with exactly the columns that were asked for: <solution>the query</solution>.
"""
NO_TOOL = """\
You answer questions about a SQLite database. Think between <think> and </think>. Then write the query whose result
answers the question, with exactly the columns that were asked for: <solution>the query</solution>.
"""


def plain(source: Mapping[str, Any], index: int) -> dict[str, Any]:
    """`data_source`, `db_id`, `sql`, and `messages` without ours of the system. Raises RowError."""
    extra, spec = (source.get(name) or {} for name in ("extra_info", "reward_spec"))
    given = {
        "db_id": source.get("db_id") or extra.get("db_id"),
        "sql": source.get("sql") or (spec or source.get("reward_model") or {}).get("ground_truth"),
    }
    if source.get("prompt") is None:
        messages = [{"role": "user", "content": _question(source, index)}]
    else:
        messages = [dict(message) for message in source["prompt"]]
        if not messages or messages[-1].get("role") != "user":
            raise RowError(f"row {index}: the field 'prompt' must end with a message of the user")
    found = {name: field(given, name, index) for name in given}
    return {"data_source": str(source.get("data_source") or DATA_SOURCE), **found, "messages": messages}


def _question(source: Mapping[str, Any], index: int) -> str:
    """With the schema and what else is known, if the row tells it."""
    told = {"Database schema": source.get("schema"), "Known": source.get("external_knowledge")}
    before = "".join(f"{name}:\n{text}\n\n" for name, text in told.items() if text)
    question = field(source, "question", index)
    return f"{before}Question: {question}" if before else question


def linked(root: Path, data_source: str, db_id: str) -> str:
    """The id under which `root` has the database; a link is made there. Raises RowError."""
    name = f"{data_source}.{db_id}"
    folders = FOLDERS.get(data_source, OTHER_FOLDERS)
    files = [root / folder / db_id / f"{db_id}.sqlite" for folder in folders]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise RowError(f"there is no database {db_id!r} of {data_source}: looked for {', '.join(map(str, files))}")
    link = root / f"{name}.sqlite"
    if not link.exists():
        link.symlink_to(found.relative_to(root))
    return name


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool, system: str | None) -> Row:
    """One question, of what `plain` gives."""
    messages: Sequence[Mapping[str, str]] = source["messages"]
    if system is not None or not tool or len(messages) == 1:
        told = (TOOL if tool else NO_TOOL) if system is None else system
        messages = [*([{"role": "system", "content": told}] if told else []), messages[-1]]
    extra = {"question": messages[-1]["content"], "tools_kwargs": {"db_id": source["db_id"]}}
    return row(source["data_source"], messages, "sql", source["sql"], split, index, extra, tool)


def main(
    dataset_path: DatasetPath = "NovaSky-AI/SkyRL-SQL-653-data-newfmt",
    local_dir: LocalDir = Path("data/skysql"),
    test_split: Annotated[str, typer.Option("--test_split", help="What the source calls its held-out rows.")] = (
        "validation"
    ),
    databases: Annotated[
        Path | None, typer.Option("--databases", help="Folder of the databases, in which links are made.")
    ] = None,
    test_size: TestSize = 64,
    seed: Seed = 42,
    limit: Limit = None,
    tool: Annotated[bool, typer.Option(help="Tell the model of the tool, and let it use it.")] = True,
    system: Annotated[str | None, typer.Option("--system", help="Another system message; empty: none.")] = None,
) -> None:
    """Make the data set. Where the source has no held-out rows, `test_size` rows are, and all others on a database of
    theirs."""

    def read(split: str) -> list[dict[str, Any]]:
        rows = [plain(source, i) for i, source in enumerate(load(dataset_path, split, limit=limit))]
        for each in rows if databases is not None else ():
            each["db_id"] = linked(databases.resolve(), each["data_source"], each["db_id"])
        return rows

    train = read("train")
    splits = (
        {"train": train, "test": read(test_split)}
        if has_split(dataset_path, test_split)
        else divide(train, "db_id", test_size, seed)
    )
    save(convert(splits, lambda source, split, i: as_row(source, split, i, tool, system)), local_dir)


if __name__ == "__main__":
    run(main)
