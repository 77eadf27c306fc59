"""Columns that rows lack, and gold answers that they send to the tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from doctor_setups import only, row

from verl_tool.checks.finding import Severity
from verl_tool.checks.rows import columns_are_there, ground_truth_leak
from verl_tool.checks.setup import Row

FOR_REWARD = ("data_source", "reward_model")
ERROR, WARNING = Severity.ERROR, Severity.WARNING


def named(rows: Sequence[dict[str, Any]]) -> list[Row]:
    return [Row(f"row {i}", each) for i, each in enumerate(rows)]


def lacks(*rows: dict[str, Any], for_reward: Sequence[str] = FOR_REWARD) -> list[tuple[Severity, str]]:
    return [(each.severity, str(each)) for each in columns_are_there(named(rows), for_reward)]


def leaks(*rows: dict[str, Any]) -> list[tuple[Severity, str]]:
    return [(each.severity, str(each)) for each in ground_truth_leak(named(rows))]


def sends(gold: Any, **tools_kwargs: Any) -> dict[str, Any]:
    return row(gold=gold, extra_info={"tools_kwargs": tools_kwargs})


def test_whole_rows_are_no_finding() -> None:
    rows = [row(), row(extra_info=None), row(extra_info={"tools_kwargs": {"tools": ["calculator"], "unit": "m"}})]
    assert not lacks(*rows)
    assert not leaks(*rows)


@pytest.mark.parametrize("name", ["prompt", "data_source", "reward_model"])
def test_a_row_without_a_column_that_is_needed_is_named(name: str) -> None:
    only(lacks(row(), row(**{name: None})), ERROR, f"1 of 2 rows have no {name!r}, row 1 the first")


def test_a_reward_model_without_ground_truth_is_named() -> None:
    only(lacks(row(reward_model={"style": "rule"})), ERROR, "no 'reward_model.ground_truth'")


def test_a_manager_of_one_s_own_may_read_other_columns() -> None:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "reward_model": {}}]
    assert not lacks(*rows, for_reward=())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "a text"}, "row 0: the prompt is not a list of messages"),
        ({"use_tool": "maybe"}, "row 0: use_tool is 'maybe'"),
        ({"extra_info": {"tools_kwargs": {"tools": 3}}}, "row 0: tools_kwargs.tools is 3"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(change: dict[str, Any], words: str) -> None:
    only(lacks(row(**change)), ERROR, words)


def test_tools_kwargs_outside_of_extra_info_is_a_warning() -> None:
    only(lacks(row(tools_kwargs={"a": 1})), WARNING, "extra_info.tools_kwargs")


@pytest.mark.parametrize(
    ("gold", "sent"),
    [
        ("Danube", {"answer": "Danube"}),
        ("Danube", {"deep": {"list": ["x", " Danube "]}}),
        (1234, {"number": 1234}),
        ('["Danube", "Donau"]', {"hint": "Donau"}),
        ({"target": ["Danube"]}, {"hint": "Danube"}),
        (np.array(["Danube"]), {"hint": np.array(["Danube"])}),
        (json.dumps({"tests": ["assert add(1, 2) == 3"]}), {"tests": ["assert add(1, 2) == 3"]}),
    ],
)
def test_a_gold_answer_that_is_sent_is_a_warning(gold: Any, sent: dict[str, Any]) -> None:
    only(leaks(sends(gold, **sent)), WARNING, "1 of 1 rows send their gold answer", "unless the tool needs it")


def test_a_few_rows_that_send_it_or_a_text_that_holds_it_are_a_warning() -> None:
    few = [sends("Danube", river="Danube"), *[sends(f"river {i}", river="x") for i in range(4)]]
    only(leaks(*few), WARNING, "1 of 5 rows", "row 0 as tools_kwargs.river")
    held = [sends("the long river", page="It is the long river of all.")]
    only(leaks(*held), WARNING, "a text that holds their gold answer")


@pytest.mark.parametrize(
    ("gold", "sent"),
    [("yes", {"flag": "yes"}), ("42", {"timeout": 42}), ("A", {"grade": "A"}), ("Danube", {"tools": ["Danube"]})],
)
def test_trivial_golds_and_names_of_tools_are_no_finding(gold: str, sent: dict[str, Any]) -> None:
    assert not leaks(sends(gold, **sent))


def test_what_is_not_sent_may_hold_the_gold_answer() -> None:
    assert not leaks(row(gold="Danube", extra_info={"answer": "Danube"}))
