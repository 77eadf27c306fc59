"""What a line of the console tells of a step."""

from __future__ import annotations

from verl_tool.trainer.progress.step_table import (
    ASYNC_COLUMNS,
    COLUMNS,
    HEADING_EVERY,
    NOT_REPORTED,
    StepRow,
    StepTable,
    heading,
    step_row,
)

METRICS = {
    "timing_s/step": 20.04,
    "timing_s/gen": 11.0,
    "timing_s/update_actor": 3.0,
    "timing_s/update_critic": 1.5,
    "critic/score/mean": -0.25,
    "agent/success/mean": 0.375,
    "agent/tool/python/calls": 30.0,
    "agent/tool/python/valid": 1.0,
    "agent/tool/none/calls": 10.0,
    "agent/tool/none/valid": 0.0,
    "actor/ppo_kl": 0.00034,
    "actor/entropy": float("nan"),
}


def test_a_row_holds_what_the_metrics_tell():
    row = step_row(METRICS, 3)
    assert row is not None
    assert row.step == 3
    assert row.values == {
        "reward": -0.25,
        "success": 0.375,
        "valid": 0.75,
        "rollout": 11.0,
        "update": 4.5,
        "step s": 20.04,
        "kl": 0.00034,
    }


def test_metrics_of_a_validation_alone_are_no_step():
    assert step_row({"val-core/calculator/acc/mean@1": 0.5, "timing_s/testing": 3.0}, 0) is None


def test_each_value_stands_under_its_title():
    row = step_row(METRICS, 3)
    titles, line = StepTable().lines(row, 24)
    assert titles == heading()
    assert len(titles) == len(line)
    assert line.split()[:6] == ["3/24", "-0.250", "37.5%", NOT_REPORTED, "75%", NOT_REPORTED]
    end = titles.index("reward") + len("reward")
    assert line[:end].endswith("-0.250")


def test_the_titles_come_again():
    table = StepTable()
    printed = [line for step in range(HEADING_EVERY + 1) for line in table.lines(StepRow(step, {}), 0)]
    assert [i for i, line in enumerate(printed) if line == heading()] == [0, HEADING_EVERY + 1]
    assert all(len(line) == len(heading()) for line in printed)


def test_age_and_importance_weights_stand_behind_the_others_where_sampling_is_asynchronous():
    age, weights = "training/off_policy/trajectory_staleness_worst", "rollout_corr/rollout_is"
    told = {f"{age}/mean": 0.5, f"{age}/max": 2, f"{weights}_mean": 1.25, f"{weights}_ratio_fraction_high": 0.01}
    metrics = METRICS | told | {f"{weights}_eff_sample_size": 0.75}
    row = step_row(metrics, 3, asynchronous=True)
    titles, line = StepTable().lines(row, 24)
    assert titles == heading((*COLUMNS, *ASYNC_COLUMNS))
    assert line.split()[-5:] == ["0.50", "2", "1.250", "1.0%", "75%"]
    assert step_row(metrics, 3) == step_row(METRICS, 3)


def test_a_column_is_wide_enough_for_its_title():
    assert all(column.width >= len(column.title) for column in (*COLUMNS, *ASYNC_COLUMNS))
