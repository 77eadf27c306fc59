"""A look at all rows of a data file, before hours of training end at one that cannot be used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_tool.agent_loop.prompt.conversation import without_images
from verl_tool.agent_loop.row import (
    MEDIA_COLUMNS,
    REWARD_COLUMNS,
    reject_media,
    row_turns,
    text_messages,
    uses_tools,
)
from verl_tool.errors import ConfigError

SUFFIXES = (".parquet", ".json", ".jsonl")
"""Of files that are read."""
ROWS_AT_A_TIME = 1024
_MESSAGE_OF_TEXT = frozenset({"role", "content", "name"})


class RowFile:
    """A file of rows, local or not, for all who look at its rows. A parquet file is opened once, at the first look."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_parquet(self) -> bool:
        """Whether its name says so."""
        return self.path.suffix == ".parquet"

    @property
    def is_readable(self) -> bool:
        """Whether it is here, and of a kind that is read: parquet, a JSON list of rows, or a row of JSON a line."""
        return self.path.suffix in SUFFIXES and self.path.is_file()

    @cached_property
    def parquet(self) -> Any:
        """The open ``pyarrow.parquet.ParquetFile``. Raises what pyarrow raises."""
        from pyarrow.parquet import ParquetFile

        return ParquetFile(self.path)

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Mapping[str, Any]]:
        """The rows, of a parquet file with the named `columns` only, as far as it has them (``a.b`` is the part b of
        a; None: all). None of a file that is not readable."""
        if not self.is_readable:
            return
        if self.is_parquet:
            names = None if columns is None else list(columns)
            for batch in self.parquet.iter_batches(ROWS_AT_A_TIME, columns=names):
                yield from batch.to_pylist()
        else:
            yield from _of_json(self.path) if self.path.suffix == ".json" else _of_json_lines(self.path)

    def first_rows(self, most: int) -> Iterator[Mapping[str, Any]]:
        """The first `most` rows with all that they hold. None of a file that is not readable."""
        if self.is_readable and self.is_parquet:
            yield from next((batch.to_pylist() for batch in self.parquet.iter_batches(most)), [])
        else:
            yield from itertools.islice(self.rows(), most)

    def count(self) -> int | None:
        """How many rows there are; None if the file is not readable."""
        if not self.is_readable:
            return None
        return int(self.parquet.metadata.num_rows) if self.is_parquet else sum(1 for _ in self.rows())

    def columns(self) -> set[str]:
        """Names of the columns, in JSON of the first row; none if there is no row. The file must be readable."""
        if self.is_parquet:
            return set(self.parquet.schema_arrow.names) if self.parquet.metadata.num_rows else set()
        return set(next(self.rows(), {}))


def row_files(config: DictConfig) -> tuple[RowFile, ...]:
    """The files that a training reads, each once. None if a class of the user's makes other rows of them."""
    if config.data.get("custom_cls", {}).get("path") is not None:
        return ()
    names = [name for files in (config.data.train_files, config.data.get("val_files")) for name in file_names(files)]
    return tuple(RowFile(Path(name).expanduser()) for name in dict.fromkeys(names))


def file_names(files: Any) -> list[str]:
    """The names in ``data.train_files`` or ``data.val_files``: one, several, or none."""
    return [str(name) for name in ([files] if isinstance(files, str) else files or ())]


def check_rows(
    file: RowFile,
    prompt_key: str = "prompt",
    media_columns: Sequence[str] = MEDIA_COLUMNS,
    no_images: str | None = "the loop carries text only",
) -> None:
    """Raises ConfigError that names the first row with content in one of `media_columns` or other media in its prompt,
    with a ``use_tool`` that is no truth value, or with ``max_turns`` or ``min_turns`` that are no number of turns.

    `no_images`: why images in the prompt are refused; None: they are not.

    Of a parquet file only columns are read that could hold such. A ``.json`` file holds a list of rows or a row a line.
    A file of another kind is left to the loop, which refuses a row when its turn comes.
    """
    requested = (prompt_key, "use_tool", "max_turns", "min_turns", *media_columns)
    rows = _rows_with_content(file, requested, prompt_key) if file.is_parquet else file.rows()
    for i, row in enumerate(rows):
        where = f"row {i} of {file}"
        reject_media(row, where, media_columns, no_images or "")
        uses_tools(row.get("use_tool"), where)
        for column in ("max_turns", "min_turns"):
            row_turns(row.get(column), where, column)
        prompt = row.get(prompt_key)
        if prompt is not None:
            (text_messages if no_images else without_images)(prompt, where)


def columns_for_reward(config: DictConfig) -> tuple[str, ...]:
    """Columns that rewards are computed from, as far as known: managers that are found by their names read these.

    One of a file of its own may read others, and verl asks no manager where a reward model alone gives the scores.
    """
    reward = config.reward
    by_model_alone = reward.reward_model.enable and reward.custom_reward_function.path is None
    return () if by_model_alone or reward.reward_manager.source != "register" else REWARD_COLUMNS


def check_columns(file: RowFile, required: Sequence[str]) -> None:
    """Raises ConfigError if the file holds no row, or its first row lacks one of the `required` columns.

    A file that is not readable is left alone.
    """
    if not file.is_readable:
        return
    names = file.columns()
    if not names:
        raise ConfigError(f"{file} holds no rows; make the data again")
    for column in required:
        if column not in names:
            raise ConfigError(f"{file} has no column {column!r}; it has {', '.join(sorted(names))}")


def check_row_count(config: DictConfig, files: Sequence[RowFile]) -> None:
    """Raises ConfigError if the training files, as far as they can be counted here, hold no batch. `files`: those of
    `row_files`."""
    data, batch = config.data, config.data.train_batch_size
    known = {file.path: file for file in files}
    requested = [known.get(Path(name).expanduser()) for name in file_names(data.train_files)]
    counts = [file.count() if file is not None else None for file in requested]
    if config.trainer.get("val_only", False) or not counts or None in counts:
        return
    rows, limit = sum(count or 0 for count in counts), data.get("train_max_samples", -1)
    source = f"the {rows} rows of data.train_files"
    if 0 < limit < rows:
        rows, source = limit, f"data.train_max_samples={limit}"
    if rows < batch:
        raise ConfigError(
            f"data.train_batch_size={batch} is above {source}: no step is left to train; lower it (BATCH_SIZE, with "
            "MINI_BATCH_SIZE), or make more rows"
        )


def _rows_with_content(file: RowFile, wanted: Sequence[str], prompt_key: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a parquet file with those of the `wanted` columns that it has; no row if all of them hold text by
    their types."""
    schema = file.parquet.schema_arrow
    columns = [name for name in dict.fromkeys(wanted) if name in schema.names]
    if prompt_key in columns and _is_text(schema.field(prompt_key).type):
        columns.remove(prompt_key)
    return file.rows(columns) if columns else iter(())


def _is_text(column: Any) -> bool:
    """Whether a column's type leaves room for a role and a text in each message, and for nothing else."""
    import pyarrow as arrow

    if not (arrow.types.is_list(column) or arrow.types.is_large_list(column)):
        return False
    message = column.value_type
    return (
        arrow.types.is_struct(message)
        and {field.name for field in message} <= _MESSAGE_OF_TEXT
        and all(arrow.types.is_string(field.type) or arrow.types.is_large_string(field.type) for field in message)
    )


def _of_json(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        yield from _of_json_lines(path)
        return
    for i, row in enumerate(found if isinstance(found, list) else [found]):
        yield _object(row, i, path)


def _of_json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for i, line in enumerate(line for line in file if line.strip()):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"row {i} of {path} is no JSON: {error}") from error
            yield _object(row, i, path)


def _object(row: object, i: int, path: Path) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"row {i} of {path} is a {type(row).__name__}; it must be an object")
    return row
