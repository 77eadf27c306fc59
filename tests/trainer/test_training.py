"""A training from the command line to the checkpoint by each trainer: verl, vLLM, the tool server, all real."""

from __future__ import annotations

import pytest
from calculator_run import TRAINS_ON_CPU, Calculator, Run, small_run

from verl_tool.agent_loop.trajectory import Author, read_jsonl
from verl_tool.trainer.main_ppo import LOG
from verl_tool.trainer.monitoring.time_by_phase import time_by_phase
from verl_tool.trainer.monitoring.token_records import tokens_of

pytestmark = [*TRAINS_ON_CPU, pytest.mark.timeout(1500)]


BOTH_TRAINERS = [pytest.param("false", id="v0", marks=pytest.mark.e2e), pytest.param("true", id="v1")]


@pytest.fixture(scope="module", params=BOTH_TRAINERS)
def finished(request: pytest.FixtureRequest, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp(f"grpo_{request.param}")
    run = small_run(folder, calculator, f"trainer.use_v1={request.param}", "algorithm.adv_estimator=grpo")
    run.finish()
    return run


def test_rollout_and_training_agree(finished):
    """The second step's tokens were sampled by weights that the first step changed and handed over."""
    trained = finished.steps()
    assert set(trained) == {1, 2}
    assert trained[1]["actor/grad_norm"] > 0
    for data in trained.values():
        assert data["training/rollout_probs_diff_max"] < 1e-4
        assert data["agent/faulted"] == 0


def test_records_hold_what_was_trained_on(finished):
    trajectories = list(read_jsonl(finished.folder / "trajectories" / "step_2.jsonl"))
    assert len(trajectories) == 64
    assert all(t.reward is not None and len(t.response_log_probs or ()) == len(t.response_ids) for t in trajectories)
    assert any(s.author is Author.TOOL for t in trajectories for s in t.segments)
    assert (finished.folder / "trajectories" / "validation_2.jsonl").exists()
    for line, trajectory in enumerate(trajectories):
        tokens = tokens_of(finished.folder / "trajectories" / "step_2.jsonl", line)
        assert tokens["mask"].tolist() == trajectory.response_mask
        told = zip(tokens["log_probs"], trajectory.response_log_probs or (), tokens["mask"], strict=True)
        assert all(abs(own - engines) < 1e-2 for own, engines, mask in told if mask)
    data = finished.steps()[2]
    assert data["timing_s/token_records"] < data["timing_s/step"]


def test_the_model_can_be_loaded_elsewhere(finished):
    from transformers import AutoModelForCausalLM

    exported = finished.folder / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    assert AutoModelForCausalLM.from_pretrained(exported).config.model_type == "qwen3"


def test_the_user_hears_of_each_phase(finished):
    """A line a step, since the output is no terminal, and where the time went; the rest is in the log."""
    printed, log = finished.printed(), (finished.folder / LOG).read_text()
    rows = [line.split() for line in printed.splitlines()]
    titles = next(row for row in rows if row[:2] == ["step", "reward"])
    steps = [row for row in rows if row and row[0] in ("1/2", "2/2")]
    assert [row[0] for row in steps] == ["1/2", "2/2"]
    assert all(len(row) + 2 == len(titles) and "-" not in row for row in steps)  # "step s", "prob diff"
    assert "validation of step 2" in printed
    assert "time by phase" in printed
    assert len(printed.splitlines()) < 40
    assert "AgentTaskRunner" in log
    assert "AgentTaskRunner" not in printed
    assert "\r" not in printed
    assert {"set-up", "rollout", "update", "weight sync", "validation"} <= set(time_by_phase(finished.folder))


def test_nothing_is_left_running(finished):
    """Neither the tool server nor a worker outlives the training."""
    assert finished.processes() == {}
