"""Numbers out of their ranges, and what is calculated from them."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_loop import composed

from verl_tool.errors import ConfigError
from verl_tool.trainer import main_ppo
from verl_tool.trainer.preflight.ranges import RANGES, check_ranges

ROLLOUT = "actor_rollout_ref.rollout"


def problems(*overrides: str) -> str:
    try:
        check_ranges(composed("platform=cpu", *overrides))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{ROLLOUT}.n=0", "at least 1"),
        (f"{ROLLOUT}.temperature=-1", "at least 0"),
        (f"{ROLLOUT}.top_p=0", "above 0 and at most 1"),
        (f"{ROLLOUT}.top_k=-2", "at least -1"),
        (f"{ROLLOUT}.gpu_memory_utilization=6", "at most 1"),
        ("actor_rollout_ref.actor.optim.lr=-0.5", "at least 0"),
        ("data.train_batch_size=0", "at least 1"),
        ("trainer.save_freq=-2", "at least -1"),
        ("trainer.n_gpus_per_node=many", "is no number"),
        ("data.train_batch_size=x", "is no number"),
    ],
)
def test_a_number_out_of_its_range_is_named_with_the_range(setting, message):
    name, _, value = setting.partition("=")
    problem = problems(setting)
    assert name in problem
    assert value in problem
    assert message in problem


def test_all_range_errors_are_reported_together_before_any_calculation():
    assert len(problems("data.train_batch_size=x", f"{ROLLOUT}.n=0").splitlines()) == 2
    for each in RANGES:
        with pytest.raises(ConfigError, match=f"{each.setting}='x' is no number"):
            main_ppo.complete(composed("platform=cpu", f"++{each.setting}=x"))


def test_what_cannot_be_calculated_for_another_reason_is_an_error_of_ours():
    with pytest.raises(ConfigError, match=r"a setting cannot be calculated: .*division"):
        main_ppo.complete(composed("platform=cpu", "trainer.default_hdfs_dir='${calc.quotient:1,0}'"))
