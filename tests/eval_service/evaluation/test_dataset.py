"""Rows of verl's data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_tools import picture

from eval_service.evaluation.dataset import read_problems
from verl_tool.errors import ConfigError

ROW: dict[str, Any] = {
    "data_source": "calculator",
    "prompt": [{"role": "user", "content": "What is 1+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 0},
    "use_tool": False,
}


def test_jsonl_and_parquet_give_the_same_problems(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [ROW, ROW | {"use_tool": True}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    problems = read_problems(tmp_path / "a.jsonl")
    assert problems == read_problems(tmp_path / "a.parquet")
    assert [p.use_tool for p in problems] == [False, True]
    assert problems[0].messages == ({"role": "user", "content": "What is 1+2?"},)
    assert read_problems(tmp_path / "a.parquet", limit=1) == problems[:1]


def test_images_of_the_column_are_read_in_their_places(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = picture(1)
    row = ROW | {"prompt": [{"role": "user", "content": "<image>What?"}], "images": [{"bytes": image.data}]}
    parquet.write_table(pyarrow.Table.from_pylist([row, ROW | {"images": []}]), tmp_path / "a.parquet")
    first, second = read_problems(tmp_path / "a.parquet")
    assert first.messages == ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},)
    assert (first.images, second.images) == ((image,), ())
    (tmp_path / "b.jsonl").write_text(json.dumps(ROW | {"videos": ["a.mp4"]}))
    with pytest.raises(ConfigError, match=r"row 0 of .*b\.jsonl has content in 'videos'"):
        read_problems(tmp_path / "b.jsonl")


def test_the_digest_changes_with_question_and_answer(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"reward_model": {"ground_truth": "4"}}, ROW | {"prompt": [{"role": "user", "content": "?"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len({problem.digest for problem in read_problems(tmp_path / "a.jsonl")}) == 3


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"prompt": []}', "row 0 of .* lacks 'prompt'"),
        ("a.jsonl", "", "holds no rows"),
        ("a.csv", "x", r"ends in '\.csv'"),
        ("b.jsonl", None, "is no file"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_problems(tmp_path / name)
