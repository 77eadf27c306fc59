"""What is evaluated is what was trained: the trainer's validation and the endpoint give the same tokens and masks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_service import live_service

from verl_tool.agent_loop.trajectory import Trajectory, read_jsonl

openai = pytest.importorskip("openai")
pytest.importorskip("vllm")
pytest.importorskip("verl")

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
TRAINER_SECONDS = 1200
PROBLEMS = 24
INLINE = ["actor_rollout_ref.agent.action_stop_tokens=['<call>','<submit>']"]
CHAT = [*INLINE, "actor_rollout_ref.agent.enable_mtrl=true"]


def rows(folder: Path) -> Path:
    """The calculator's problems, as the recipe makes them."""
    script = ROOT / "examples/data_preprocess/calculator.py"
    sizes = ["--train_size", "32", "--test_size", str(PROBLEMS)]
    subprocess.run([sys.executable, script, "--local_dir", folder, *sizes], check=True, timeout=300)
    return folder


def validate(run: Path, data: Path, model: Path, mode: list[str]) -> list[Trajectory]:
    """The trajectories of the trainer's validation of `model`, before any training. It leaves a run's folder behind."""
    settings = [
        "platform=cpu",
        f"run_dir={run}",
        "tool_server.start=calculator,finish",
        "trainer.use_v1=false",
        "trainer.val_only=true",
        "trainer.val_before_train=true",
        "trainer.total_training_steps=1",
        "trainer.resume_mode=disable",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=32",
        "data.max_prompt_length=32",
        "data.max_response_length=64",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.agent.max_turns=2",
        "actor_rollout_ref.agent.tool_call_timeout=180",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.rollout.max_model_len=112",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        "reward.reward_manager.name=calculator",
        "algorithm.adv_estimator=grpo",
        "stall_timeout=600",
        *mode,
    ]
    command = [sys.executable, "-m", "verl_tool.trainer.main_ppo", *settings]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(
        command,
        cwd=run.parent,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TRAINER_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return list(read_jsonl(run / "trajectories/validation_0.jsonl"))


async def answers(url: str, prompts: list[str]) -> list[Trajectory]:
    """The endpoint's trajectories, greedy because the run's validation was."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        model = (await client.models.list()).data[0].id
        told = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt}],
                    extra_body={"return_trajectory": True},
                )
                for prompt in prompts
            )
        )
    return [Trajectory.from_json(json.dumps(answer.choices[0].trajectory)) for answer in told]


def by_prompt(trajectories: list[Trajectory]) -> dict[tuple[int, ...], Any]:
    """What must be equal, by the prompt's tokens: all tokens, who wrote them, why it ended, and each call."""
    return {
        tuple(t.prompt_ids): (
            t.response_ids,
            t.response_mask,
            t.stop,
            [(call.action, call.observation, call.valid) for call in t.calls],
        )
        for t in trajectories
    }


@pytest.mark.parametrize("mode", [INLINE, CHAT], ids=["inline", "chat"])
def test_tokens_masks_and_calls_are_those_of_the_trainers_validation(
    mode: list[str], calculator_model: Path, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    data = rows(tmp_path / "data")
    trained = validate(tmp_path / "run", data, calculator_model, mode)
    prompts = [row["prompt"][0]["content"] for row in parquet.read_table(data / "test.parquet").to_pylist()]
    with live_service(["--from_run", str(tmp_path / "run"), "--model", str(calculator_model)], tmp_path) as service:
        served = asyncio.run(answers(service.url, prompts))
    assert len(trained) == len(served) == PROBLEMS
    assert sum(len(t.calls) for t in served) > PROBLEMS // 2
    assert by_prompt(served) == by_prompt(trained)
