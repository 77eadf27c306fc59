"""Filters, order, search and neighbours of the table."""

from __future__ import annotations

import numpy as np
import pytest
from made_run import made_run

from verl_tool.errors import ConfigError
from verl_tool.viewer import record_query
from verl_tool.viewer.record_index import RecordIndex
from verl_tool.viewer.record_query import Query, facets, find_rows, group_of, neighbours, page, prompts
from verl_tool.viewer.run_files import Run


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    index = RecordIndex(Run("run", made_run(tmp_path_factory.mktemp("runs") / "run", steps=5)))
    index.refresh()
    return index.records


def found(records, **given):
    return records.rows[find_rows(records, Query.of(given)).rows]


def test_each_filter_keeps_what_it_says(records):
    rows = records.rows
    assert set(found(records, files="step_2,step_3")["step"]) == {2, 3}
    assert len(found(records, fault="overloaded")) == len(found(records, fault="(any)")) == (rows["index"] == 0).sum()
    assert len(found(records, stop="answered")) == (rows["index"] != 0).sum()
    assert (found(records, reward_min="0.5")["reward"] == 1).all()
    assert (found(records, failed_calls_min="1")["failed_calls"] > 0).all()
    search = found(records, tool="search")
    assert 0 < len(search) < len(rows)
    assert len(found(records, tool="sear")) == 0
    assert len(found(records, stop="never seen")) == 0


def test_what_is_unknown_comes_last_in_either_order(records):
    for descending in ("1", ""):
        rewards = found(records, sort="reward", desc=descending)["reward"]
        known = rewards[~np.isnan(rewards)]
        assert np.isnan(rewards[len(known) :]).all()
        assert (np.diff(known) <= 0).all() if descending else (np.diff(known) >= 0).all()


def test_words_are_sorted_by_themselves(records):
    tools = [records.words[place] for place in found(records, sort="tools")["tools"]]
    assert tools == sorted(tools)


@pytest.mark.parametrize(
    ("text", "index"), [("WHAT IS 4 +", 4), ("window.taken = 1</SCRIPT>", 1), ("\u202efdp", 1), ("\x1b[31m", 1)]
)
def test_texts_are_searched(records, text, index):
    assert set(found(records, text=text)["index"]) == {index}


def test_names_of_fields_are_no_text(records):
    assert len(found(records, text="log_probs")) == 0


def test_a_search_that_takes_too_long_says_how_far_it_came(records, monkeypatch):
    monkeypatch.setattr(record_query, "SEARCH_SECONDS", -1.0)
    told = page(records, Query(text="no such words"), 0, 10)
    assert told["searched"] < told["candidates"] == len(records.rows)


def test_pages_join_to_the_whole(records):
    query = Query(sort="seconds")
    rows = [row["row"] for offset in range(0, 120, 7) for row in page(records, query, offset, 7)["rows"]]
    assert rows == find_rows(records, query).rows.tolist()


def test_neighbours_follow_the_order_of_the_table(records):
    query = Query(sort="reward", descending=True)
    order = find_rows(records, query).rows
    told = neighbours(records, query, int(order[1]))
    first, third = records.rows[order[0]], records.rows[order[2]]
    assert told["place"] == 1
    assert told["previous"]["line"] == first["line"]
    assert told["next"]["line"] == third["line"]
    failure = told["next_failure"]
    row = next(
        r for r in records.rows if records.files[r["file"]].name == failure["file"] and r["line"] == failure["line"]
    )
    assert row["correct"] == 0


def test_a_group_is_one_prompt_in_one_file(records):
    rows = records.rows[group_of(records, 9)]
    assert len(rows) == 4
    assert len(set(rows["index"])) == len(set(rows["file"])) == 1


def test_prompts_are_compared_from_first_to_last_step(records):
    told = prompts(records, "")
    assert told["total"] == 5
    for prompt in told["prompts"]:
        rows = records.rows[(records.rows["prompt"] == prompt["prompt"]) & np.isfinite(records.rows["reward"])]
        assert prompt["steps"] == 5
        assert prompt["first"] == rows["reward"][rows["step"] == 1].mean()
        assert prompt["last"] == rows["reward"][rows["step"] == 5].mean()


def test_facets_count(records):
    told = facets(records, Query(files=("step_1",)))
    assert told["stop"] == {"answered": 20, "fault": 4}
    assert sum(told["tool"].values()) == 24
    assert sum(told["rewards"]["counts"]) == 20


@pytest.mark.parametrize("given", [{"sort": "nothing"}, {"reward_min": "much"}, {"prompt": "x"}])
def test_what_is_asked_wrongly_is_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given.values()))):
        Query.of(given)
