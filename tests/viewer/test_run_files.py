"""Which folders are runs."""

from __future__ import annotations

import pytest
from made_run import made_run

from verl_tool.errors import ConfigError
from verl_tool.viewer.run_files import Run, find_runs


def test_runs_are_named_by_their_paths(tmp_path):
    made_run(tmp_path / "calculator/grpo")
    (tmp_path / "evaluation/aime").mkdir(parents=True)
    (tmp_path / "evaluation/aime/records.jsonl").write_text("")
    (tmp_path / "calculator/grpo/checkpoints").mkdir()
    (tmp_path / "calculator/grpo/checkpoints/metrics.jsonl").write_text("")
    assert list(find_runs([tmp_path])) == ["calculator/grpo", "evaluation/aime"]
    assert list(find_runs([tmp_path / "calculator/grpo"])) == ["grpo"]
    assert list(find_runs([tmp_path / "calculator/grpo/trajectories"])) == ["grpo"]


def test_a_file_of_records_is_a_run(tmp_path):
    folder = made_run(tmp_path / "run", steps=2)
    (run,) = find_runs([folder / "trajectories/step_2.jsonl"]).values()
    assert [file.step for file in run.record_files()] == [2]


def test_two_of_one_name_are_told_apart(tmp_path):
    first, second = made_run(tmp_path / "a/grpo"), made_run(tmp_path / "b/grpo")
    assert {name: run.folder for name, run in find_runs([first, second]).items()} == {
        "grpo": first,
        "grpo (2)": second,
    }


def test_files_come_in_the_order_of_their_steps(tmp_path):
    folder = made_run(tmp_path / "run", steps=11)
    (folder / "trajectories/validation_0.jsonl").write_text("")
    (folder / "trajectories/validation_10.jsonl").write_text("")
    names = [file.name for file in Run("run", folder).record_files()]
    assert names[:2] == ["validation_0", "step_1"]
    assert names[-3:] == ["validation_10", "step_10", "step_11"]


def test_a_config_that_is_no_yaml_is_told(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"config\.yaml is not valid YAML"):
        Run("run", tmp_path).config()
