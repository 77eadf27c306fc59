"""Metrics that leave their range."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_tool.errors import ConfigError
from verl_tool.trainer.monitoring.metric_limits import CALLS_SHARE, FRESH_DIFF, OLDEST, RULES, MetricWatch
from verl_tool.trainer.monitoring.tool_use_collapse import CALLS, STEPS

CONFIG = Path(__file__).parents[3] / "verl_tool" / "trainer" / "config" / "agent_ppo_trainer.yaml"
LIMITS = OmegaConf.load(CONFIG).metric_limits
KL = RULES["ppo_kl"].metric
ENTROPY = RULES["entropy_share"].metric


def lines(limits: dict[str, float | None], *steps: dict[str, float]) -> list[list[str]]:
    watch = MetricWatch(limits)
    return [watch.check(metrics, step) for step, metrics in enumerate(steps, 1)]


def test_every_rule_has_its_limit_in_the_config():
    assert set(LIMITS) == {*RULES, CALLS_SHARE}
    MetricWatch(LIMITS)


def test_a_line_when_it_leaves_and_one_when_it_is_back(caplog):
    with caplog.at_level(logging.WARNING):
        values = ({KL: 0.01}, {KL: 0.26}, {KL: 0.76}, {}, {KL: 0.02}, {KL: 0.02})
        fine, left, still, silent, back, again = lines({"ppo_kl": 0.05}, *values)
    assert (fine, still, silent, again) == ([], [], [], [])
    assert left[0].startswith("step 2: actor/ppo_kl is 0.26, above its limit (metric_limits.ppo_kl: 0.05); ")
    assert "lower actor.optim.lr" in left[0]
    assert back == ["step 5: actor/ppo_kl is 0.02, back in its range (metric_limits.ppo_kl: 0.05)"]
    assert [record.getMessage() for record in caplog.records] == left + back


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.falling])
def test_what_rises_too_high_is_told(name):
    limit, metric = LIMITS[name], RULES[name].metric
    assert [bool(said) for said in lines({name: limit}, {metric: limit}, {metric: limit * 1.01})] == [False, True]


def test_probabilities_of_older_weights_are_no_disagreement_and_those_of_the_same_weights_are():
    name, fresh = "probability_difference", f"{FRESH_DIFF}_mean"
    older = {RULES[name].metric: 0.1, OLDEST: 1}
    stale, mixed, wrong = lines({name: 0.02}, older, older | {fresh: 1e-6}, older | {fresh: 0.1})
    assert (stale, mixed) == ([], [])
    assert wrong[0].startswith(f"step 3: {fresh} is 0.1, above its limit")


def test_a_policy_that_moves_the_other_way_is_told():
    fine, left = lines({"ppo_kl": 0.05}, {KL: -0.04}, {KL: -0.3})
    assert fine == []
    assert "actor/ppo_kl is -0.3, below minus its limit (metric_limits.ppo_kl: 0.05)" in left[0]


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.falling])
def test_what_falls_below_its_share_of_its_peak_is_told(name):
    metric = RULES[name].metric
    values = [{metric: value} for value in (0.0, 0.5, 2.0, 0.21, 0.19, 0.3)]
    *fine, left, back = lines({name: 0.1}, *values)
    assert fine == [[]] * 4
    assert f"{metric} is 0.19, below its limit (metric_limits.{name}: 0.1 of its highest value, 2)" in left[0]
    assert "back in its range" in back[0]


@pytest.mark.parametrize("metric", [KL, ENTROPY])
def test_no_number_is_outside_of_every_range(metric):
    name = next(name for name, rule in RULES.items() if rule.metric == metric)
    left, back = lines({name: 0.1}, {metric: math.nan}, {metric: 0.05})
    assert "is nan" in left[0]
    assert "back" in back[0]


def test_calls_that_die_out_are_told_and_written_to_the_log(caplog):
    steps = [{CALLS: 2.0}, *[{CALLS: 0.1}] * (STEPS + 2)]
    with caplog.at_level(logging.WARNING):
        told = [line for said in lines({CALLS_SHARE: 0.1}, *steps) for line in said]
    assert len(told) == 1
    assert told[0].startswith(f"step {STEPS + 1}: the calls have died out")
    assert [record.getMessage() for record in caplog.records] == told
    assert not any(lines({CALLS_SHARE: None}, *steps))


def test_null_is_no_limit():
    assert lines({"ppo_kl": None}, {KL: 100.0}) == [[]]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"kl": 0.1}, "metric_limits.kl is unknown; known: ppo_kl,"),
        ({"ppo_kl": -1.0}, "ppo_kl=-1.0; it must be between 0 and inf"),
        ({"entropy_share": 2.0}, "entropy_share=2.0; it must be between 0 and 1"),
        ({"tool_calls_share": 1.5}, "tool_calls_share=1.5; it must be between 0 and 1"),
    ],
)
def test_wrong_limits_are_named(limits, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        MetricWatch(limits)
