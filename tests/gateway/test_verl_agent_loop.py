"""A program that nobody changed is trained: its requests are the rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("torch")

import agent_program_run
from calculator_run import ACTOR, AGENT, ROLLOUT, TRAINS_ON_CPU, Calculator, Run, small_run
from environment_packages import LENGTHS, peer, write_module
from stored_runs import replay

from verl_tool.agent_loop.trajectory import Trajectory, read_jsonl
from verl_tool.gateway.agent_host import PROGRAM
from verl_tool.gateway.session_record import SESSION
from verl_tool.trainer.monitoring.token_records import tokens_of

pytestmark = [*TRAINS_ON_CPU, pytest.mark.e2e, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent_program")


@pytest.fixture(scope="module")
def overrides(folder: Path) -> tuple[str, ...]:
    return agent_program_run.prepare(folder)


@pytest.fixture(scope="module")
def run(folder: Path, calculator: Calculator, overrides: tuple[str, ...]) -> Run:
    run = small_run(folder / "run", calculator, *overrides)
    run.finish()
    return run


def records(run: Run, step: int) -> list[Trajectory]:
    return list(read_jsonl(run.folder / "trajectories" / f"step_{step}.jsonl"))


def test_it_trains(run: Run) -> None:
    for data in run.steps().values():
        assert data["actor/grad_norm"] > 0
        assert data["training/rollout_probs_diff_max"] < 1e-4


def test_a_rollout_is_what_the_program_sampled(run: Run) -> None:
    turns = set()
    for step in run.steps():
        for line, record in enumerate(records(run, step)):
            assert record.fault is None
            assert record.extra[PROGRAM]["exit_code"] == 0
            assert record.num_turns in (1, 2)
            assert len(record.extra[SESSION]["answers"]) == record.num_turns
            turns.add(record.num_turns)
            known = tokens_of(run.folder / "trajectories" / f"step_{step}.jsonl", line)
            ours = [p for p, m in zip(known["log_probs"], record.response_mask, strict=True) if m]
            engine = [p for p, m in zip(record.response_log_probs or (), record.response_mask, strict=True) if m]
            assert ours == pytest.approx(engine, abs=1e-3)
    assert turns == {1, 2}


def test_nothing_is_left_running(run: Run) -> None:
    assert run.processes() == {}


def test_its_rewards_come_from_the_record(run: Run) -> None:
    result = replay(run.folder, "--regrade")
    assert result.exit_code == 0, result.output
    assert "0 differ" in result.output


def test_its_update_comes_out_as_it_did(run: Run, folder: Path) -> None:
    result = replay(run.folder, "--retrain", 1, "--run_dir", folder / "retrained", "--tolerance", 1e-5)
    assert result.exit_code == 0, result.output
    _same_rollouts(run, folder / "retrained")


def test_a_training_on_its_records_starts_no_program(
    run: Run, folder: Path, calculator: Calculator, overrides: tuple[str, ...]
) -> None:
    missing = "gateway.program.command=[program_that_is_not_there]"
    stored = f"actor_rollout_ref.replay={run.folder / 'trajectories'}"
    again = small_run(folder / "again", calculator, *overrides, missing, stored, "trainer.total_training_steps=1")
    again.finish()
    _same_rollouts(run, again.folder)


@pytest.mark.parametrize("package", LENGTHS)
def test_environments_of_a_package_are_trained_by_what_it_scores(
    package: str, tmp_path: Path, calculator: Calculator
) -> None:
    install, module = peer(package), write_module(tmp_path, "toy_lengths", LENGTHS[package])
    name, data = f"{module}@lengths" if package == "inspect" else "toy-lengths", tmp_path / "data"
    script = Path(__file__).parents[2] / "examples" / "data_preprocess" / "environment_programs.py"
    options = ("--package", package, "--name", name, "--install", install, "--local_dir", data, "--test_size", "2")
    arguments = ("--arguments", '{"agent": {"harness": {"id": "null"}}}') if package == "verifiers" else ()
    command = [sys.executable, *map(str, (script, *options, *arguments))]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(module.parent)})
    run = small_run(
        tmp_path / "run",
        calculator,
        *("trainer.use_v1=true", "algorithm.adv_estimator=grpo", "trainer.val_before_train=false"),
        *(f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"),
        *("data.train_batch_size=2", f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=2"),
        *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"),
        *(f"gateway.program.preset={package}", f"gateway.program.install={install}", "tool_server.start=null"),
        *(f"gateway.program.readable=[{module}]", f"+gateway.program.env.PYTHONPATH={module.parent}"),
        *("gateway.session.max_tokens=24", f"{AGENT}.enable_agent=false", f"{AGENT}.max_concurrent_trajectories=2"),
        *("reward.reward_manager.name=environment", "trainer.save_freq=-1", "trainer.test_freq=2"),
    )
    run.finish()
    assert set(run.steps()) == {1, 2}
    kept = [record for step in run.steps() for record in records(run, step)]
    assert [record.fault for record in kept] == [None] * 16
    assert all(record.reward == len(record.response_text) % 3 / 2 for record in kept)
    assert len({record.reward for record in kept}) > 1


def _same_rollouts(run: Run, other: Path) -> None:
    """The first step of `other` has the rows, masks, rewards and descriptions of `run`'s."""

    def by_content(records: list[Trajectory]) -> list[str]:
        return sorted(
            str((t.segments, t.contexts, t.loss_mask, t.reward, t.extra[SESSION], t.extra[PROGRAM])) for t in records
        )

    found = list(read_jsonl(other / "trajectories" / "step_1.jsonl"))
    assert by_content(found) == by_content(records(run, 1))
