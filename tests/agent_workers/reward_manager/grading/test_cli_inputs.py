"""Rows and options of the commands that grade given texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from verl_tool.agent_workers.reward_manager.grading.cli_inputs import parse_options, read_rows
from verl_tool.agent_workers.reward_manager.grading.manager_process import UnusableError

ROWS: list[dict[str, Any]] = [
    {"data_source": "a", "reward_model": {"style": "rule", "ground_truth": "72"}},
    {"data_source": "b", "reward_model": {"style": "rule", "ground_truth": "3"}},
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_recipe_s_rows_are_read_with_their_ground_truth(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pd.DataFrame(ROWS).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    assert read_rows(path) == [{"data_source": "a", "ground_truth": "72"}, {"data_source": "b", "ground_truth": "3"}]
    assert len(read_rows(path, 1)) == 1


def test_rows_may_hold_the_ground_truth_itself(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\n{"ground_truth": [1]}\n', "utf-8")
    assert read_rows(tmp_path / "rows.jsonl") == [{"ground_truth": [1]}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.jsonl", "", "has no rows"),
        ("rows.jsonl", "{", "row 0 is not JSON"),
        ("rows.jsonl", "[1]", "row 0 is a list"),
        ("rows.jsonl", '{"a": 1}', "neither reward_model nor ground_truth; it has: a"),
        ("rows.jsonl", '{"reward_model": "72"}', "must have a ground_truth; it is '72'"),
        ("rows.parquet", "{}", "cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UnusableError, match=words):
        read_rows(tmp_path / name)
    with pytest.raises(UnusableError, match="does not exist"):
        read_rows(tmp_path / "other")


def test_options_are_json_or_text_and_may_stand_in_groups() -> None:
    given = ["server_url=http://h:1", "binary=false", "shaping.turns.weight=-0.5", "shaping.turns.limit=3"]
    assert parse_options(given) == {
        "server_url": "http://h:1",
        "binary": False,
        "shaping": {"turns": {"weight": -0.5, "limit": 3}},
    }


@pytest.mark.parametrize(("given", "words"), [(["right"], "write name=value"), (["a=1", "a.b=2"], "a has a value")])
def test_options_that_are_none_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(UnusableError, match=words):
        parse_options(given)
