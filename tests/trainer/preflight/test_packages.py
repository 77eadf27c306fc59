"""Names, combinations and packages of engines and strategies."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("verl")

from preflight_configs import changed_config, gpu_config

from verl_tool.trainer.preflight import packages
from verl_tool.trainer.preflight.backends import check_combinations
from verl_tool.trainer.preflight.packages import CHECKPOINT_ENGINES, check_packages, is_installed

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
SEPARATE = {"trainer.use_v1": True, "trainer.v1.trainer_mode": "separate_async"}


@pytest.fixture(autouse=True)
def _only_what_recipes_need(monkeypatch):
    """Which of the packages below are installed does not depend on the environment of the test."""
    there = {"vllm", "wandb", "tensorboard", "torch"}
    monkeypatch.setattr(packages, "is_installed", lambda module: module in there)


def test_recipes_name_what_exists():
    assert [*check_combinations(gpu_config()), *check_packages(gpu_config())] == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({f"{ROLLOUT}.name": "???"}, "rollout.name is not set; set it to vllm"),
        ({f"{ROLLOUT}.quantization": "int3"}, "quantization='int3' is unknown; known: fp8, torchao"),
        ({f"{ROLLOUT}.quantization": "fp8", "trainer.device": "cpu"}, "quantization=fp8 needs a GPU"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "ncccl"}, "backend='ncccl' is unknown; known: naive, gloo, nccl"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"}, "delta_sharded with .*name=vllm; it is for sglang"),
    ],
)
def test_names_and_combinations_that_cannot_work(overrides, problem):
    told = "\n".join(check_combinations(changed_config("acecoder/gpu.yaml", overrides)))
    assert re.search(problem, told), told


def test_checkpoint_engines_are_those_of_verl_and_ours():
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    source = "".join(path.read_text() for path in Path(folder, "checkpoint_engine").glob("*.py"))
    assert set(CHECKPOINT_ENGINES) == {
        *re.findall(r'^@CheckpointEngineRegistry.register\("(.*)"\)', source, re.M),
        "gloo",
    }


@pytest.mark.parametrize(
    ("overrides", "setting", "module"),
    [
        ({f"{MODEL}.use_liger": True}, "model.use_liger=true", "liger_kernel"),
        ({f"{ROLLOUT}.quantization": "torchao"}, "quantization=torchao", "torchao"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "nccl", **SEPARATE}, "backend=nccl", "cupy"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "nixl", **SEPARATE}, "backend=nixl", "nixl"),
        ({f"{ACTOR}.optim.optimizer_impl": "bitsandbytes.optim"}, "optimizer_impl=bitsandbytes.optim", "bitsandbytes"),
        ({"trainer.logger": ["console", "swanlab"]}, "trainer.logger=swanlab", "swanlab"),
    ],
)
def test_a_missing_package_is_named_with_what_asks_for_it(overrides, setting, module):
    (told,) = check_packages(changed_config("acecoder/gpu.yaml", overrides))
    assert setting in told
    assert f"needs the Python package {module}, which is not installed; install it (uv pip install " in told


def test_weights_within_a_process_need_no_checkpoint_engine():
    assert not list(
        check_packages(changed_config("acecoder/gpu.yaml", {f"{ROLLOUT}.checkpoint_engine.backend": "nccl"}))
    )


def test_a_module_of_a_missing_package_is_missing():
    assert is_installed("verl.utils.config")
    assert not is_installed("no_such_package.within")
