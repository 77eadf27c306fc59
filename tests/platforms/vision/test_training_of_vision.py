"""A training of a tiny model that reads images by each trainer, from the command line to the checkpoint, all real.

Pictures stand in prompts and come from a tool in the middle of trajectories; some rows have none at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calculator_run import ACTOR, AGENT, ROLLOUT, TRAINS_ON_CPU, Run

pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

import shown_tool
from tiny_vision import make_vision_model

from verl_tool.agent_loop.trajectory import Author, Trajectory, read_jsonl

pytestmark = [*TRAINS_ON_CPU, pytest.mark.e2e, pytest.mark.timeout(1500)]
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return zlib.crc32(solution_str.encode()) % 2
"""


STOPS = ",".join(f"'{letter}'" for letter in "abcdefghijklmnopqrstuvwxyz")
"""A model that was never taught anything writes one of them soon: its turns end, and each is a call."""

LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.exclude_modules='.*visual.*'",
    f"{ROLLOUT}.load_format=safetensors",
)


def row(number: int) -> dict[str, Any]:
    """The prompts of half of the rows have one picture, or two; every fourth row uses no tool."""
    pictures = [shown_tool.striped(number + n, 64 + 32 * n).data for n in range((0, 1, 0, 2)[number % 4])]
    return {
        "prompt": [{"role": "user", "content": "<image>" * len(pictures) + f"Which digit? {number}"}],
        "images": [{"bytes": data, "path": None} for data in pictures],
        "use_tool": number % 4 != 2,
        "data_source": "toy",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": number},
    }


def write_rows(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for name, numbers in (("train", range(16)), ("test", range(16, 20))):
        table = pyarrow.Table.from_pylist([row(number) for number in numbers])
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")


def vision_run(folder: Path, kind: str, *overrides: str) -> Run:
    """A training of two steps, 32 trajectories each."""
    folder.mkdir(parents=True, exist_ok=True)
    make_vision_model(kind, folder / "model")
    write_rows(folder)
    (folder / "reward.py").write_text(REWARD)
    return Run(
        folder,
        (
            *("platform=cpu", f"run_dir={folder}/run", f"tool_server.start={shown_tool.__file__}"),
            *("tool_server.start_timeout=400", "stall_timeout=600", f"actor_rollout_ref.model.path={folder}/model"),
            *(f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet"),
            *("data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=96"),
            *(
                "doctor=false",
                "data.filter_overlong_prompts=false",
                f"{AGENT}.max_turns=2",
                f"{AGENT}.formats=[{shown_tool.__file__}]",
            ),
            *(
                f"{AGENT}.max_action_length=24",
                f"{AGENT}.action_stop_tokens=[{STOPS}]",
                f"{AGENT}.tool_schemas=none",
                f"{AGENT}.enable_mtrl=true",
            ),
            *(f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.optim.lr=1e-3"),
            *(f"{ACTOR}.use_kl_loss=false", f"{ROLLOUT}.n=4", f"{ROLLOUT}.max_model_len=192"),
            *(f"{ROLLOUT}.max_num_seqs=32", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"),
            *(f"reward.custom_reward_function.path={folder}/reward.py", "trainer.total_training_steps=2"),
            *("trainer.total_epochs=9", "trainer.logger=[console,file]", "trainer.save_freq=2", "trainer.test_freq=2"),
            *overrides,
        ),
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3_vl", "trainer.use_v1=false"), id="qwen3_vl-v0"),
        pytest.param(("qwen3_vl", "trainer.use_v1=true"), id="qwen3_vl-v1"),
        pytest.param(("qwen2_5_vl", "trainer.use_v1=true"), id="qwen2_5_vl-v1"),
        pytest.param(("qwen3_vl", "trainer.use_v1=true", *LORA), id="qwen3_vl-v1-lora"),
    ],
)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind, *overrides = request.param
    run = vision_run(tmp_path_factory.mktemp(kind), kind, "algorithm.adv_estimator=grpo", *overrides)
    run.finish()
    return Run(run.folder / "run", ())


def trajectories(run: Run, name: str) -> list[Trajectory]:
    return list(read_jsonl(run.folder / "trajectories" / f"{name}.jsonl"))


def test_rollout_and_training_agree(finished: Run) -> None:
    """The second step's tokens were sampled by weights that the first step changed and handed over."""
    trained = finished.steps()
    assert set(trained) == {1, 2}
    assert trained[1]["actor/grad_norm"] > 0
    for data in trained.values():
        # Every probability of this model is about a three-hundredth: 1e-4 would show no fault.
        assert data["training/rollout_probs_diff_max"] < 1e-6
        assert data["agent/faulted"] == 0


def test_the_model_saw_pictures_in_prompts_and_of_the_tool(finished: Run) -> None:
    for name in ("step_2", "validation_2"):
        seen = trajectories(finished, name)
        prompts = [[s.image is not None for s in t.segments[: t.prompt_segments]] for t in seen]
        assert {sum(images) for images in prompts} == {0, 1, 2}
        shown = [sum(s.image is not None for s in t.response) for t in seen]
        assert any(not any(images) and not n for images, n in zip(prompts, shown, strict=True))
        # A model that is asked greedily may never end a turn.
        assert name != "step_2" or max(shown) >= 2
        assert all(s.author is Author.TOOL for t in seen for s in t.response if s.image is not None)
    kept = {path.stem for path in (finished.folder / "trajectories" / "images").iterdir()}
    assert kept == {s.image for n in (0, 2) for t in trajectories(finished, f"validation_{n}") for s in t.segments} - {
        None
    }


def test_the_model_can_be_loaded_elsewhere(finished: Run) -> None:
    from transformers import AutoModelForImageTextToText

    exported = finished.folder / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    assert AutoModelForImageTextToText.from_pretrained(exported).config.model_type.endswith("_vl")
