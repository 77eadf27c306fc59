"""Runs as jobs of Harbor. With ``VERL_TOOL_HARBOR_PYTHON``, an interpreter that has Harbor reads them too."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from atif_schema import check_atif
from typer.testing import CliRunner, Result

from verl_tool.agent_loop.trajectory import (
    DELEGATED,
    Author,
    CallRecord,
    RowContext,
    Segment,
    StopReason,
    Timings,
    Trajectory,
    write_jsonl,
)
from verl_tool.protocol import Fault, FaultKind
from verl_tool.trajectories.trajectories_cli import app

READER = Path(__file__).parents[1] / "helpers/harbor_reader.py"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = Trajectory(
    "t1",
    (
        Segment(Author.PROMPT, (1, 2), text="What is 1+2?"),
        Segment(Author.MODEL, (5, 6), (-0.5, -1.0), f"<think>\nAdd.\n</think>\n{CALL}"),
        Segment(Author.MODEL, (7,), (-1.0,), "I add.", row=1, agent=1),
        Segment(Author.TOOL, (8,), text="3"),
        Segment(Author.MODEL, (3,), (-math.inf,), "3"),
    ),
    StopReason.ANSWERED,
    calls=(CallRecord(0, CALL, "3", names=("add",)),),
    reward=1.0,
    extra={"index": 7, "data_source": "gsm8k/main"},
    contexts=(RowContext((1, 4), DELEGATED),),
    timings=Timings(total=2.5),
)
WRONG = replace(ANSWER, trajectory_id="t2", reward=0.0, stop=StopReason.MAX_TURNS)
FAULT = Fault(kind=FaultKind.SANDBOX, message="it broke", retryable=False)
FAILED = replace(ANSWER, trajectory_id="t3", reward=None, stop=StopReason.FAULT, fault=FAULT)
UNGRADED = replace(ANSWER, trajectory_id="t4", reward=None, extra={"reward_fault": "the judge is down"})


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with two files of trajectories."""
    folder = tmp_path / "my run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text("actor_rollout_ref: {model: {path: /models/Qwen3-8B}}")
    write_jsonl(folder / "trajectories/step_1.jsonl", [ANSWER, WRONG, FAILED])
    write_jsonl(folder / "trajectories/validation_0.jsonl", [UNGRADED])
    return folder


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["harbor", *map(str, arguments)], env={"COLUMNS": "300"})


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_run_becomes_a_job_for_each_file(run_folder: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    assert "4 trajectories written" in convert(run_folder, jobs).output
    assert sorted(path.name for path in jobs.iterdir()) == ["my_run.step_1", "my_run.validation_0"]
    job = jobs / "my_run.step_1"
    names = ["gsm8k_main-7__1", "gsm8k_main-7__2", "gsm8k_main-7__3"]
    assert sorted(path.name for path in job.iterdir() if path.is_dir()) == names
    assert read_json(job / "config.json")["agents"] == [{"name": "verl-tool", "model_name": "Qwen3-8B"}]
    stats = read_json(job / "result.json")["stats"]
    assert (stats["n_completed_trials"], stats["n_errored_trials"]) == (3, 1)
    assert stats["evals"]["verl-tool__Qwen3-8B__gsm8k/main"] == {
        "n_trials": 2,
        "n_errors": 1,
        "reward_stats": {"reward": {"1.0": names[:1], "0.0": names[1:2]}},
        "exception_stats": {"ToolFault": names[2:]},
        "metrics": [{"mean": 0.5}],
    }


def test_a_trial_has_the_trajectory_and_its_reward_or_why_there_is_none(run_folder: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    convert(run_folder, jobs)
    right = jobs / "my_run.step_1/gsm8k_main-7__1"
    document = read_json(right / "agent/trajectory.json")
    check_atif(document)
    assert document["agent"]["model_name"] == "Qwen3-8B"
    assert [each["trajectory_id"] for each in document["subagent_trajectories"]] == ["t1/agent_1"]
    assert read_json(right / "verifier/reward.json") == {"reward": 1.0}
    result = read_json(right / "result.json")
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert result["agent_result"]["metadata"] == {"stored_at": "step_1:1", "stop": "answered", "excluded": None}
    failed = jobs / "my_run.step_1/gsm8k_main-7__3"
    assert not (failed / "verifier").exists()
    failure = read_json(failed / "result.json")["exception_info"]
    assert (failure["exception_type"], failure["exception_message"]) == ("ToolFault", "sandbox: it broke")
    (ungraded,) = (path for path in (jobs / "my_run.validation_0").iterdir() if path.is_dir())
    assert ungraded.name.startswith("rows-")
    assert read_json(ungraded / "result.json")["exception_info"]["exception_message"] == "the judge is down"


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """The folder of an evaluation."""
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "evaluation.json").write_text('{"model": "served"}')
    (folder / "summary.json").write_text("{}")
    own = json.loads(replace(ANSWER, reward=None, extra={}).to_json())
    record = {"index": 4, "sample": 0, "digest": "d", "score": 0.25, "reward_fault": None, "trajectory": own}
    lines = [record, record | {"trajectory": None}]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_an_evaluations_answers_have_its_scores(evaluation: Path, tmp_path: Path) -> None:
    output = convert(evaluation, tmp_path / "jobs").output
    assert "not carried: answers without a trajectory (1 of 1)" in output
    result = read_json(tmp_path / "jobs/evaluation.records/rows-4__1/result.json")
    assert result["verifier_result"] == {"rewards": {"reward": 0.25}}
    assert result["agent_info"]["model_info"] == {"name": "served"}


def test_a_file_alone_and_other_names(run_folder: Path, tmp_path: Path) -> None:
    source = run_folder / "trajectories/step_1.jsonl"
    convert(source, tmp_path / "jobs", "--name", "mine", "--model", "m", "--limit", 1)
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["mine.step_1"]
    assert read_json(tmp_path / "jobs/mine.step_1/result.json")["n_total_trials"] == 1
    assert convert(source, tmp_path / "named").exit_code == 0
    assert [path.name for path in (tmp_path / "named").iterdir()] == ["my_run.step_1"]


def test_what_cannot_be_read_or_written_is_an_error(run_folder: Path, tmp_path: Path) -> None:
    assert convert(run_folder, tmp_path / "jobs").exit_code == 0
    again = convert(run_folder, tmp_path / "jobs")
    assert again.exit_code == 2
    assert "my_run.step_1 exists; remove it, or choose another --name" in again.output
    assert "nowhere is no file of trajectories" in convert(tmp_path / "nowhere", tmp_path / "jobs").output
    with (run_folder / "trajectories/step_1.jsonl").open("a") as file:
        file.write('{"trajectory_id": ')
    broken = convert(run_folder, tmp_path / "more")
    assert broken.exit_code == 2
    assert "step_1.jsonl:4 is no JSON" in broken.output


def test_a_model_that_cannot_be_read_is_an_error(run_folder: Path, evaluation: Path, tmp_path: Path) -> None:
    (run_folder / "config.yaml").write_text("actor_rollout_ref: {model: {}}")
    assert convert(run_folder, tmp_path / "jobs", "--name", "without").exit_code == 0
    assert "model_name" not in read_json(tmp_path / "jobs/without.step_1/config.json")["agents"][0]
    for file in (run_folder / "config.yaml", evaluation / "evaluation.json"):
        file.write_text("{")
        assert "does not say which model it is of" in convert(file.parent, tmp_path / "jobs").output
        assert convert(file.parent, tmp_path / "jobs", "--model", "m").exit_code == 0


@pytest.mark.slow
@pytest.mark.skipif(
    "VERL_TOOL_HARBOR_PYTHON" not in os.environ,
    reason="VERL_TOOL_HARBOR_PYTHON names no interpreter (Python 3.12 or newer) that has harbor",
)
def test_harbor_reads_the_jobs(run_folder: Path, evaluation: Path, tmp_path: Path) -> None:
    for source in (run_folder, evaluation):
        assert convert(source, tmp_path / "jobs").exit_code == 0
    command = [os.environ["VERL_TOOL_HARBOR_PYTHON"], str(READER), str(tmp_path / "jobs")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
    assert found["invalid"] == {}
    jobs = found["jobs"]
    assert sorted(jobs) == ["evaluation.records", "my_run.step_1", "my_run.validation_0"]
    step = jobs["my_run.step_1"]
    assert (step["models"], step["n_completed_trials"], step["n_errored_trials"]) == (["Qwen3-8B"], 3, 1)
    assert step["evals"] == {"verl-tool__Qwen3-8B__gsm8k/main": {"metrics": [{"mean": 0.5}]}}
    assert step["tasks"]["gsm8k_main-7"]["avg_reward"] == 0.5
    assert step["tasks"]["gsm8k_main-7"]["avg_duration_ms"] == 2500
    trials = step["trials"].values()
    assert sorted((trial["name"][-1], trial["reward"], trial["error_type"]) for trial in trials) == [
        ("1", 1.0, None),
        ("2", 0.0, None),
        ("3", None, "ToolFault"),
    ]
    for trial in trials:
        assert [each["source"] for each in trial["trajectory"]["steps"]] == ["user", "agent", "agent"]
        assert trial["result"]["agent_result"]["n_output_tokens"] == 3
        assert trial["verifier"]["reward"] == (None if trial["reward"] is None else {"reward": trial["reward"]})
