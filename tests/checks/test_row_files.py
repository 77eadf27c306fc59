from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

arrow = pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from verl_tool.checks.row_files import RowFile, check_columns, check_row_count, check_rows, row_files  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402

KINDS = ["parquet", "jsonl", "json", "json in lines"]
TEXT = {"prompt": [{"role": "user", "content": "a"}]}
PART = {"prompt": [{"role": "user", "content": [{"type": "image", "text": None}]}]}
PARTS_OF_TEXT = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind.removesuffix(' in lines')}"
    if kind in ("jsonl", "json in lines"):
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def of(folder: Path, kind: str, rows: list[dict[str, Any]]) -> RowFile:
    return RowFile(written(folder, kind, rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{**TEXT, "images": None}] * 1500 + [{**TEXT, "images": ["a.png"]}], "row 1500 of .* content in 'images'"),
        ([{**TEXT, "pictures": []}, {**TEXT, "pictures": ["a"]}], "row 1 of .* content in 'pictures'"),
        ([PARTS_OF_TEXT, PART], "row 1 of .*, message 0 contains a part of type 'image'"),
        ([{**TEXT, "use_tool": "yes"}], "row 0 of .*: use_tool is 'yes'"),
        ([{"prompt": [{"role": "user", "content": "a", "images": ["x"]}]}], "row 0 of .* content in 'images'"),
    ],
)
def test_a_row_with_more_than_text_is_named(tmp_path: Path, kind: str, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_rows(of(tmp_path, kind, rows), media_columns=("images", "pictures"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "json in lines"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, [{**TEXT, "reward_model": {"ground_truth": "1"}}])
    check_columns(RowFile(path), ["prompt", "reward_model"])
    with pytest.raises(ConfigError, match=r"rows\.\w+ has no column 'data_source'; it has prompt, reward_model"):
        check_columns(RowFile(path), ["prompt", "data_source"])
    with pytest.raises(ConfigError, match="holds no rows"):
        check_columns(RowFile(written(tmp_path, "jsonl" if kind == "parquet" else kind, [])), ["prompt"])


@pytest.mark.parametrize("kind", KINDS)
def test_text_passes_with_empty_columns_of_images(tmp_path: Path, kind: str) -> None:
    rows = [{**TEXT, "images": [], "use_tool": None}, {**TEXT, "images": None, "use_tool": False}]
    check_rows(of(tmp_path, kind, rows))
    check_rows(of(tmp_path, kind, [PARTS_OF_TEXT]))


@pytest.mark.parametrize("kind", KINDS)
def test_images_pass_where_the_model_reads_them_and_other_media_do_not(tmp_path: Path, kind: str) -> None:
    check_rows(of(tmp_path, kind, [{**PART, "images": ["a.png"]}]), media_columns=("videos",), no_images=None)
    with pytest.raises(ConfigError, match=r"row 0 of .* content in 'videos', which is not carried: the model would"):
        check_rows(of(tmp_path, kind, [{**PART, "videos": ["a.mp4"]}]), media_columns=("videos",), no_images=None)
    with pytest.raises(ConfigError, match=r"content in 'images', which is not carried \(the model reads text only\)"):
        check_rows(of(tmp_path, kind, [{**TEXT, "images": ["a"]}]), no_images="the model reads text only")


def test_of_plain_text_nothing_is_read_but_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "parquet", [TEXT])

    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", read)
    check_rows(RowFile(path))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_is_no_row_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"row 1 of .* is a str"):
        check_rows(of(tmp_path, kind, [TEXT, "text"]))  # type: ignore[list-item]


def of_rows(*files: Path, **data: Any) -> DictConfig:
    settings = {"train_files": list(map(str, files)), "train_batch_size": 4, **data}
    return OmegaConf.create({"data": settings, "trainer": {"val_only": False}})


def check_count(config: DictConfig) -> None:
    check_row_count(config, row_files(config))


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_hold_no_batch_are_refused(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, [TEXT] * 3)
    with pytest.raises(ConfigError, match=r"train_batch_size=4 is above the 3 rows of data.train_files: .*BATCH_SIZE"):
        check_count(of_rows(path))
    check_count(of_rows(path, path))
    with pytest.raises(ConfigError, match=r"train_batch_size=4 is above data.train_max_samples=2"):
        check_count(of_rows(path, path, train_max_samples=2))


def test_rows_that_cannot_be_counted_here_are_not(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", [TEXT])
    check_count(of_rows(path, Path("hdfs://host/rows.parquet")))
    check_count(of_rows(path, custom_cls={"path": "mine.py"}))
