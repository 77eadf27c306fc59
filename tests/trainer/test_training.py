"""One training from the command line to the checkpoint: verl, vLLM, the tool server, all real. Takes minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from verl_tool.agent_loop.trajectory import Author, read_jsonl  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="for machines without accelerator"),
]

RECIPE = Path(__file__).parents[2] / "examples" / "train" / "calculator"
ROLLOUT, ACTOR, AGENT = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "agent"))


def run(*command: str | Path, seconds: float) -> str:
    """Run to the end; its output. Bytecode is cached, or imports in a dozen processes take minutes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of two steps, with a model that is right often: 64 wrong answers would teach nothing."""
    folder = tmp_path_factory.mktemp("run")
    source, model = folder / "source", folder / "model"
    data = RECIPE.parents[1] / "data_preprocess" / "calculator.py"
    run(data, "--local_dir", source, "--train_size", "64", "--test_size", "16", seconds=120)
    run(RECIPE / "warmup.py", "--output", model, "--target", "0.3", seconds=400)
    run(RECIPE / "rows_for_run.py", "--data", source, "--out", folder / "data", seconds=120)
    run(
        *("-m", "verl_tool.trainer.main_ppo", "platform=cpu", f"run_dir={folder}", "trainer.use_v1=false"),
        *("tool_server.start=calculator,finish", "tool_server.start_timeout=400", "stall_timeout=600"),
        *(f"data.train_files={folder}/data/train.parquet", f"data.val_files={folder}/data/test.parquet"),
        *("data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=48"),
        *(f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo"),
        *(f"{AGENT}.action_stop_tokens=['<call>','<submit>']", f"{AGENT}.max_turns=4"),
        *(f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", f"{ACTOR}.optim.lr=1e-3"),
        *(f"{ACTOR}.use_kl_loss=false", f"{ROLLOUT}.n=8", f"{ROLLOUT}.max_model_len=96"),
        *(f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64"),
        *("reward.reward_manager.name=calculator", "trainer.total_training_steps=2", "trainer.total_epochs=9"),
        *("trainer.logger=[console,file]", "trainer.save_freq=2", "trainer.test_freq=2"),
        seconds=1200,
    )
    return folder


def test_rollout_and_training_agree(finished):
    """The second step's tokens were sampled by weights that the first step changed and handed over."""
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    trained = {line["step"]: line["data"] for line in steps if "actor/grad_norm" in line["data"]}
    assert set(trained) == {1, 2}
    assert trained[1]["actor/grad_norm"] > 0
    for data in trained.values():
        assert data["training/rollout_probs_diff_max"] < 1e-4
        assert data["agent/faulted"] == 0


def test_records_hold_what_was_trained_on(finished):
    trajectories = list(read_jsonl(finished / "trajectories" / "step_2.jsonl"))
    assert len(trajectories) == 64
    assert all(t.reward is not None and len(t.response_log_probs or ()) == len(t.response_ids) for t in trajectories)
    assert any(s.author is Author.TOOL for t in trajectories for s in t.segments)
    assert (finished / "trajectories" / "validation_2.jsonl").exists()


def test_the_model_can_be_loaded_elsewhere(finished):
    from transformers import AutoModelForCausalLM

    exported = finished / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    assert AutoModelForCausalLM.from_pretrained(exported).config.model_type == "qwen3"


def test_nothing_is_left_running(finished):
    """Neither the tool server nor a worker outlives the training."""
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(finished).encode() in _read(p)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
