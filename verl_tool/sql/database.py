"""The file of a database, by its id, under a root folder."""

from __future__ import annotations

from pathlib import Path

from verl_tool.errors import ConfigError

SUFFIXES = (".sqlite", ".db", ".sqlite3")
MAX_ID_CHARACTERS = 200


def database_file(root: Path, db_id: object) -> Path:
    """``ROOT/ID/ID.sqlite``, as BIRD, Spider and SynSQL have it, or ``ROOT/ID.sqlite``; also ``.db`` and ``.sqlite3``.

    Raises ConfigError that names the id if it is no plain name, if there is no such file, if a link leads out of
    `root`, or if changes of the file wait in a journal beside it, which a reader of the file alone would not see.
    """
    if not _is_plain(db_id):
        raise ConfigError(
            f"db_id is {db_id!r:.200}; it must be a name of at most {MAX_ID_CHARACTERS} characters, no path"
        )
    folder = root.resolve()
    names = [path for suffix in SUFFIXES for path in (folder / f"{db_id}/{db_id}{suffix}", folder / f"{db_id}{suffix}")]
    path = next((path.resolve() for path in names if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"there is no database {db_id!r} under {root}: looked for {names[0]}, {names[1]} and the like"
        )
    if not path.is_relative_to(folder):
        raise ConfigError(f"database {db_id!r} is a link to {path}, which is not under {root}; copy it there")
    for journal in ("-wal", "-journal"):
        neighbours = path.with_name(path.name + journal)
        if neighbours.is_file() and neighbours.stat().st_size > 0:
            raise ConfigError(
                f"database {db_id!r} has unfinished changes in {neighbours}; open and close it with sqlite3 once"
            )
    return path


def _is_plain(db_id: object) -> bool:
    """Whether it can name a file of a folder and nothing outside of it."""
    return (
        isinstance(db_id, str)
        and 0 < len(db_id) <= MAX_ID_CHARACTERS
        and db_id.isprintable()
        and not db_id.startswith(".")
        and not set(db_id) & {"/", "\\"}
    )
