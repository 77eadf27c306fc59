"""Each recipe as it runs on GPUs, two steps of it on a CPU: see `gpu_recipes`. About a minute each.

On one rank: FSDP1 over two ranks of a CPU trains (`test_verl_patches_fsdp1.py`), but writes no checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calculator_run import TRAINS_ON_CPU
from containers import REAL_IMAGE, real

pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

from gpu_recipes import gpu_configs, gpu_run, make_text_model
from tiny_vision import make_vision_model

pytestmark = [*TRAINS_ON_CPU, pytest.mark.e2e, pytest.mark.timeout(1500)]
GAE, V0 = "algorithm.adv_estimator=gae", "trainer.use_v1=false"
VARIANTS = (
    *((recipe, name, ()) for recipe, name in gpu_configs()),
    *(("gsm8k", "gpu", others) for others in ((V0,), (GAE,), (GAE, V0))),
    ("toolgrpo", "gpu", (V0,)),
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that reads text, and one that reads images."""
    folder = tmp_path_factory.mktemp("models")
    make_text_model(folder / "text")
    make_vision_model("qwen2_5_vl", folder / "vision")
    return folder / "text", folder / "vision"


@pytest.mark.parametrize(("recipe", "name", "others"), VARIANTS, ids=lambda value: value if value else None)
def test_a_gpu_recipe_trains(recipe, name, others, models, tmp_path):
    text, vision = models
    run = gpu_run(tmp_path, recipe, name, vision if recipe == "pixel_reasoner" else text, *others)
    run.finish(1200)
    steps = run.steps()
    assert set(steps) == {1, 2}
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert GAE not in others or metrics["critic/grad_norm"] > 0
        # Every probability is about one in eight hundred; bf16 keeps three digits.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert (run.folder / "checkpoints" / "global_step_2" / "actor").is_dir()


VERIFIER = """
test "$(id -u)" = 0 && test "$(stat -c %u number)" = 1000 && grep -q "^$(cat /closed/number)$" number || exit 3
echo "{\\"reward\\": $((RANDOM % 2)), \\"is_root\\": 1}" > /logs/verifier/reward.json
"""


def make_task(folder: Path, number: int) -> None:
    """Make a task in Harbor's layout whose image must be built, and whose verifier is root."""
    for path, text in {
        "task.toml": "[agent]\nuser = 1000\n[verifier]\ntimeout_sec = 900\n",
        "instruction.md": f"What is the number in the file? Hint {number}.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nCOPY number /app/\nCOPY number /closed/\n"
        "RUN chown -R 1000:1000 /app && chmod 700 /closed\nWORKDIR /app\n",
        "environment/number": f"{number}\n",
        "tests/test.sh": VERIFIER,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def test_tasks_with_images_train_in_containers(models, tmp_path):
    engine = real("podman")
    for number in range(3):
        make_task(tmp_path / "tasks" / f"t{number}", number)
    (tmp_path / "tasks" / "wrong").mkdir()
    run = gpu_run(
        *(tmp_path, "terminal", "gpu", models[0]),
        *(f"recipe.tasks={tmp_path}/tasks", f"recipe.data={tmp_path}/data", f"recipe.engine={engine}"),
        *(f"recipe.task_base_image='python:3*={REAL_IMAGE}'", "recipe.task_memory_mb=512"),
        full=("recipe", "tool_server"),
    )
    run.finish(1200)
    assert set(run.steps()) == {1, 2}
    records = [
        json.loads(line)
        for file in (run.folder / "trajectories").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    verdicts = [record["verdict"] for record in records if "verdict" in record]
    assert len(verdicts) == 16
    assert {verdict["numbers"]["is_root"] for verdict in verdicts} == {1.0}
    assert {verdict["reward"] for verdict in verdicts} == {0.0, 1.0}
