"""One update made again: which config makes it, what is refused, and what counts as the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl")

from calculator_run import ACTOR, SUMMARIES, TRAINS_ON_CPU, Calculator, Run, small_run
from stored_runs import replay, stored_run, trajectory

from verl_tool.agent_loop.trajectory import read_jsonl, write_jsonl
from verl_tool.errors import ConfigError
from verl_tool.replay.retrain import RetrainReport, compare_metrics, make_retrain_config

pytestmark = pytest.mark.slow

ROWS = [("What is 2+2?", "4")]
LINES = [trajectory(0, ROWS[0][0], [(answer, "")], 1.0) for answer in ("4", "5")]
GRPO = ("algorithm.adv_estimator=grpo", "data.train_batch_size=1", "actor_rollout_ref.rollout.n=2")
UPDATE = {"actor/loss": -0.5, "actor/grad_norm": 2.0}


def run_of(folder: Path, *overrides: str) -> Path:
    """A run of three steps with the weights behind the second and the third; those behind the first were removed."""
    run = stored_run(folder, ROWS, LINES, *GRPO, *overrides)
    for step in (2, 3):
        (run / f"trajectories/step_{step}.jsonl").write_text((run / "trajectories/step_1.jsonl").read_text())
    for part in ("1", "2/actor", "3/actor"):
        (run / f"checkpoints/global_step_{part}").mkdir(parents=True)
    lines = [json.dumps({"step": step, "data": UPDATE}) + "\n" for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


@pytest.mark.parametrize("newer", [False, True])
def test_it_begins_with_the_weights_before_the_step_and_leaves_the_run_alone(tmp_path: Path, newer: bool) -> None:
    run, folder = run_of(tmp_path, f"trainer.use_v1={newer}", "algorithm.filter_groups.enable=true"), tmp_path / "again"
    first, third = (make_retrain_config(run, step, folder) for step in (1, 3))
    assert first.trainer.resume_mode == "disable"
    assert third.trainer.resume_mode == "resume_path"
    assert third.trainer.resume_from_path == str(run / "checkpoints/global_step_2")
    assert third.actor_rollout_ref.replay == str(run / "trajectories")
    assert third.actor_rollout_ref.replay_step == 3
    assert (third.tool_server.start, third.algorithm.filter_groups.enable) == (None, False)
    for written in (third.run_dir, third.trajectories_dir, third.trainer.default_local_dir):
        assert Path(written).is_relative_to(folder)
    assert (third.trainer.save_freq, third.trainer.test_freq, third.trainer.val_before_train) == (-1, -1, False)


def test_a_step_without_the_weights_before_it_is_told_those_that_have_them(tmp_path: Path) -> None:
    result = replay(run_of(tmp_path), "--retrain", 2, "--run_dir", tmp_path / "again")
    assert result.exit_code == 2
    told = " ".join(result.output.split())
    assert "step 2 began with the weights of global_step_1" in told
    assert "Steps that can be repeated: 1, 3." in told
    assert "trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=null" in told
    assert not (tmp_path / "again").exists()


def test_with_a_critic_its_weights_must_be_there_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, "algorithm.adv_estimator=gae")
    with pytest.raises(ConfigError, match="Steps that can be repeated: none"):
        make_retrain_config(run, 3, tmp_path / "again")
    (run / "checkpoints/global_step_2/critic").mkdir()
    assert make_retrain_config(run, 3, tmp_path / "again").trainer.resume_mode == "resume_path"


@pytest.mark.parametrize(
    ("overrides", "step", "told"),
    [
        (("trajectories_dir=null",), 1, "has stored no trajectories"),
        (("trainer.use_v1=false", "data.train_batch_size=2"), 1, "has 2 trajectories, but a step of the run has 4"),
        (("trainer.use_v1=true", "trainer.v1.trainer_mode=separate_async"), 1, "has several batches"),
        (("algorithm.adv_estimator=remax",), 1, "needs baseline answers"),
        (("algorithm.adv_estimator=gae",), 1, "random weights"),
        (("actor_rollout_ref.model.lora_rank=8",), 1, "random weights"),
        (("reward.reward_model.enable=true",), 1, "a second model"),
        (("actor_rollout_ref.actor.checkpoint.save_contents=[model]",), 3, "lack extra, optimizer"),
    ],
)
def test_what_cannot_be_made_again_is_refused(tmp_path: Path, overrides: tuple[str, ...], step: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_retrain_config(run_of(tmp_path, *overrides), step, tmp_path / "again")


def test_nothing_is_written_into_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(ConfigError, match="lies in the folder of the run"):
        make_retrain_config(run, 1, run / "again")
    other = run_of(tmp_path / "other")
    (other / "config.yaml").write_text((other / "config/config.yaml").read_text())
    with pytest.raises(ConfigError, match="the folder of another training"):
        make_retrain_config(run, 1, other)


def test_a_run_whose_update_is_not_known_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert "lack actor/loss and actor/grad_norm of step 3" in replay(run, "--retrain", 3).output
    assert "no step_4.jsonl; steps that are stored: 1, 2, 3" in replay(run, "--retrain", 4).output
    (run / "metrics.jsonl").unlink()
    result = replay(run, "--retrain", 1)
    assert result.exit_code == 2
    assert "has no metrics.jsonl" in result.output
    assert "give one of" in replay(run, "--retrain", 1, "--regrade").output


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_an_error_of_the_training_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for path in run.parent.glob("train.jsonl"):
        path.unlink()
    result = replay(run, "--retrain", 1, "--run_dir", tmp_path / "again")
    assert result.exit_code == 2, result.output
    assert "exited with code 1: error:" in " ".join(result.output.split())


def test_what_is_within_the_tolerance_is_the_same() -> None:
    then = {
        **UPDATE,
        "actor/pg_loss": 0.0,
        "actor/entropy": float("nan"),
        "critic/score/mean": 1.0,
        "actor/perf/x": 1.0,
    }
    now = {**then, "actor/pg_loss": 9e-6, "actor/grad_norm": 2.003, "actor/perf/x": 2.0, "timing_s/step": 1.0}
    found = {metric.name: metric.same for metric in compare_metrics(then, now, 1e-3)}
    names = ["actor/grad_norm", "actor/loss", "actor/entropy", "actor/pg_loss", "critic/score/mean"]
    assert list(found) == names
    assert [name for name in names if not found[name]] == ["actor/grad_norm"]
    report = RetrainReport(3, 1e-3, list(compare_metrics(then, now, 1e-3)))
    assert report.summary() == "step 3 repeated: 1 of 5 metrics of the update differ by more than 0.001"
    assert json.loads(report.lines()[0]) == {"where": "actor/grad_norm", "was": 2.0, "now": 2.003}
    assert (report.unexpected_count(()), report.unexpected_count({("actor/grad_norm", 2.003)})) == (1, 0)
    assert all(metric.same for metric in compare_metrics(then, now, 2e-3))


@TRAINS_ON_CPU[0]
@TRAINS_ON_CPU[1]
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("newer", "context"), [("false", ()), ("true", ()), ("true", SUMMARIES)])
def test_an_update_of_a_real_training_comes_out_as_it_did(
    tmp_path: Path, calculator: Calculator, newer: str, context: tuple[str, ...]
) -> None:
    """Several updates a step, a reference model, and a learning rate that changes; and a reward that was changed."""
    run = small_run(
        tmp_path / "run",
        calculator,
        *(f"trainer.use_v1={newer}", "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=true", *context),
        *(f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=16"),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
        *(f"{ACTOR}.optim.lr=2e-4", f"{ACTOR}.optim.lr_warmup_steps_ratio=1.0", "trainer.total_training_steps=3"),
        *("trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    )
    run.finish()
    before = _files(run.folder)
    result = replay(run.folder, "--retrain", 2, "--run_dir", tmp_path / "again", "--tolerance", 1e-5)
    assert result.exit_code == 0, result.output
    assert _files(run.folder) == before
    rates = [Run(folder, ()).steps()[2]["actor/lr"] for folder in (run.folder, tmp_path / "again")]
    assert rates[0] == rates[1] != run.steps()[3]["actor/lr"]
    changed = run.folder / "trajectories" / "step_1.jsonl"
    lines = [replace(line, reward=1.0 - (line.reward or 0.0)) for line in read_jsonl(changed)]
    write_jsonl(changed, [*lines[:4], *list(read_jsonl(changed))[4:]])
    result = replay(run.folder, "--retrain", 1, "--run_dir", tmp_path / "other")
    assert result.exit_code == 1, result.output
    assert "differs" in result.output


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
