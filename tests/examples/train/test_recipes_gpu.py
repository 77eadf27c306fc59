"""Each recipe as it runs on GPUs, two steps of it on a CPU: see `gpu_recipes`. About a minute each.

On one rank: FSDP1 over two ranks of a CPU trains (`test_verl_patches_fsdp1.py`), but writes no checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from calculator_run import TRAINS_ON_CPU

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
