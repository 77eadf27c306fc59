"""Invalid rows in a validation's means."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("verl")

from verl_tool.trainer.ppo.validation import INVALID, main_results_by_source, summarise_valid


def mean_of_acc(sources, uids, columns, turns):
    return {"n": len(uids), "sources": list(sources), "acc": float(np.mean(columns["acc"]))}


def test_a_row_without_reward_is_not_counted():
    columns = {"acc": [1.0, math.nan, 0.0], "reward_fault": ["", "grader: gone", ""], "reward": [1.0, 0.0, 0.0]}
    told = summarise_valid(mean_of_acc, ["a", "b", "c"], ["1", "2", "3"], columns, [])
    assert told == {"n": 2, "sources": ["a", "c"], "acc": 0.5, INVALID: pytest.approx(1 / 3)}


def test_all_rows_count_if_none_is_invalid():
    told = summarise_valid(mean_of_acc, ["a", "b"], ["1", "2"], {"acc": [1.0, 0.0]}, [])
    assert told["n"] == 2
    assert told[INVALID] == 0


def test_no_mean_of_nothing():
    told = summarise_valid(mean_of_acc, ["a"], ["1"], {"acc": [math.nan], "reward_fault": ["gone"]}, [])
    assert told == {INVALID: 1.0}


def test_sources_of_one_owner_keep_results_of_their_own():
    metrics = {
        "val-core/openai/gsm8k/acc/mean@1": 0.5,
        "val-core/openai/other/acc/mean@4": 0.25,
        "val-core/own/acc/mean@1": 1,
    }
    metrics |= {"val-core/own/acc/best@4/mean": 0.9, "val-aux/own/acc/mean@1": 0.1}
    assert main_results_by_source(metrics) == {"openai/gsm8k": 0.5, "openai/other": 0.25, "own": 1.0}
