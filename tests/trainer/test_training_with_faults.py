"""Trainings with faults injected: a tool, a grader and an engine that fail now and then. All real; takes minutes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from calculator_run import AGENT, ROLLOUT, TRAINS_ON_CPU, Calculator, Run, small_run

from verl_tool.agent_loop.trajectory import Excluded, Trajectory, read_jsonl

pytestmark = [*TRAINS_ON_CPU, pytest.mark.e2e, pytest.mark.timeout(2400)]

HELPERS = Path(__file__).parents[1] / "helpers"
STEPS = 10
INVALID = (Excluded.FAULT, Excluded.ABORTED, Excluded.GRADER)


def faulty_run(folder: Path, calculator: Calculator, *overrides: str, manager: str = "FaultyRewardManager") -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    loops = folder / "agent_loops.yaml"
    loops.write_text("- name: verltool_agent\n  _target_: faulty_parts.AbortingAgentLoop\n")
    parts = HELPERS / "faulty_parts.py"
    return small_run(
        folder,
        calculator,
        f"tool_server.start='{parts},finish'",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.name={manager}",
        f"reward.reward_manager.module.path={parts}",
        f"reward.reward_manager.module.name={manager}",
        *(f"{AGENT}.tool_call_max_retries=0", "trainer.val_before_train=false", "trainer.test_freq=-1"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1"),
        # What is injected fails more often than a run should stand.
        *(f"{AGENT}.max_call_fault_fraction=1", f"{AGENT}.max_reward_fault_fraction=1"),
        *("algorithm.adv_estimator=grpo", *overrides),
    )


@pytest.fixture(scope="module", params=["false", "true"], ids=["v0", "v1"])
def run(request: pytest.FixtureRequest, calculator: Calculator, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HELPERS), prepend=":")
        folder = tmp_path_factory.mktemp(f"faults_{request.param}")
        run = faulty_run(folder, calculator, f"trainer.use_v1={request.param}")
        run.finish(1800)
    return run


def trajectories(run: Run) -> list[Trajectory]:
    return [t for step in range(1, STEPS + 1) for t in read_jsonl(run.folder / "trajectories" / f"step_{step}.jsonl")]


def test_it_trains_to_the_end(run):
    trained = run.steps()
    assert set(trained) == set(range(1, STEPS + 1))
    for data in trained.values():
        assert math.isfinite(data["actor/grad_norm"])
        assert math.isfinite(data["actor/pg_loss"])
        assert data["training/rollout_probs_diff_max"] < 1e-4
        assert not [name for name, value in data.items() if isinstance(value, float) and math.isnan(value)]


@pytest.mark.parametrize("cause", ["sandbox", "grader", "aborted"])
def test_metrics_tell_faults_by_cause(run, cause):
    assert sum(data[f"agent/fault/{cause}"] for data in run.steps().values()) > 0
    for data in run.steps().values():
        told = sum(value for name, value in data.items() if name.startswith("agent/fault/"))
        assert told == pytest.approx(data["agent/faulted"])


def test_records_and_metrics_agree(run):
    for step, data in run.steps().items():
        kept = list(read_jsonl(run.folder / "trajectories" / f"step_{step}.jsonl"))
        out = [t for t in kept if t.excluded is not None]
        assert len(out) / len(kept) == pytest.approx(data["agent/excluded"])
        assert all(t.reward is None for t in kept if t.excluded in INVALID)
        rewards = [t.reward for t in kept if t.excluded not in INVALID]
        assert data["critic/score/mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)


def test_a_reward_manager_that_always_raises_ends_the_run(calculator, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HELPERS), prepend=":")
        run = faulty_run(
            tmp_path / "broken", calculator, "trainer.use_v1=true", "doctor=false", manager="BrokenRewardManager"
        )
        with run.started() as process:
            assert process.wait(900) == 1
    last = run.printed().strip().splitlines()[-1]
    assert "BrokenRewardManager" in last
    assert "no such column" in last
