"""A look at all rows of a data file, before hours of training end at one that cannot be used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_tool.agent_loop.prompt.conversation import without_images
from verl_tool.agent_loop.row import (
    MEDIA_COLUMNS,
    REWARD_COLUMNS,
    own_max_turns,
    reject_media,
    text_messages,
    uses_tools,
)
from verl_tool.errors import ConfigError

ROWS_AT_A_TIME = 1024
_MESSAGE_OF_TEXT = frozenset({"role", "content", "name"})


def check_rows(
    path: Path,
    prompt_key: str = "prompt",
    media_columns: Sequence[str] = MEDIA_COLUMNS,
    no_images: str | None = "the loop carries text only",
) -> None:
    """Raises ConfigError that names the first row with content in one of `media_columns` or other media in its prompt,
    with a ``use_tool`` that is no truth value, or with a ``max_turns`` that is no number of turns.

    `no_images`: why images in the prompt are refused; None: they are not.

    Of a parquet file only columns are read that could hold such. A ``.json`` file holds a list of rows or a row a line.
    A file of another kind is left to the loop, which refuses a row when its turn comes.
    """
    columns = (prompt_key, "use_tool", "max_turns", *media_columns)
    rows = _of_parquet(path, columns, prompt_key) if path.suffix == ".parquet" else read_rows(path, columns)
    for i, row in enumerate(rows):
        where = f"row {i} of {path}"
        reject_media(row, where, media_columns, no_images or "")
        uses_tools(row.get("use_tool"), where)
        own_max_turns(row.get("max_turns"), where)
        prompt = row.get(prompt_key)
        if prompt is not None:
            (text_messages if no_images else without_images)(prompt, where)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """The rows of a local file, of a parquet file with the named `columns` only, as far as it has them (``a.b`` is the
    part b of a; None: all). None of a file of another kind than parquet and JSON, or that is not here."""
    if not path.is_file():
        return
    if path.suffix == ".parquet":
        yield from _columns_of_parquet(path, columns)
    elif path.suffix == ".json":
        yield from _of_json(path)
    elif path.suffix == ".jsonl":
        yield from _of_json_lines(path)


def first_rows(path: Path, most: int) -> Iterator[Mapping[str, Any]]:
    """The first `most` rows of a local file with all that they hold. None of a kind that `read_rows` does not read."""
    return itertools.islice(read_rows(path), most)


def columns_for_reward(config: DictConfig) -> tuple[str, ...]:
    """Columns that rewards are computed from, as far as known: managers that are found by their names read these.

    One of a file of its own may read others, and verl asks no manager where a reward model alone gives the scores.
    """
    reward = config.reward
    by_model_alone = reward.reward_model.enable and reward.custom_reward_function.path is None
    return () if by_model_alone or reward.reward_manager.source != "register" else REWARD_COLUMNS


def check_columns(path: Path, required: Sequence[str]) -> None:
    """Raises ConfigError if the file holds no row, or its first row lacks one of the `required` columns.

    A file of a kind that `check_rows` does not read is left alone.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        file = parquet.ParquetFile(path)
        names = set(file.schema_arrow.names) if file.metadata.num_rows else set()
    elif path.suffix in (".json", ".jsonl"):
        names = set(next(_of_json(path) if path.suffix == ".json" else _of_json_lines(path), {}))
    else:
        return
    if not names:
        raise ConfigError(f"{path} holds no rows; make the data again")
    for column in required:
        if column not in names:
            raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(sorted(names))}")


def check_row_count(config: DictConfig) -> None:
    """Raises ConfigError if the training files, as far as they can be counted here, hold no batch."""
    data, batch = config.data, config.data.train_batch_size
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files or ()
    counts = [_count(Path(str(name)).expanduser()) for name in files]
    made = data.get("custom_cls", {}).get("path") is not None
    if made or config.trainer.get("val_only", False) or not counts or None in counts:
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


def _count(path: Path) -> int | None:
    """Rows of a local file; None if it is not here, or of another kind than parquet and JSON."""
    if not path.is_file() or path.suffix not in (".parquet", ".json", ".jsonl"):
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    return sum(1 for _ in read_rows(path, ()))


def _of_parquet(path: Path, wanted: Sequence[str], prompt_key: str) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    schema = file.schema_arrow
    columns = [name for name in dict.fromkeys(wanted) if name in schema.names]
    if prompt_key in columns and _is_text(schema.field(prompt_key).type):
        columns.remove(prompt_key)
    if columns:
        yield from _columns_of_parquet(path, columns)


def _columns_of_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    """A row for each row of the file, also where it has none of the columns."""
    import pyarrow.parquet as parquet

    names = None if columns is None else list(columns)
    for batch in parquet.ParquetFile(path).iter_batches(ROWS_AT_A_TIME, columns=names):
        yield from batch.to_pylist()


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
