"""Ray's CPU slots, shared memory, disk and the sandbox, as they are here or are made to look."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from preflight_configs import changed_config, gpu_config

from verl_tool.sandbox.isolation.levels import Isolation, Level
from verl_tool.servers.tools import load_tools
from verl_tool.trainer.preflight import resources
from verl_tool.trainer.preflight.memory import GB
from verl_tool.trainer.preflight.model_shapes import shape_of
from verl_tool.trainer.preflight.resources import (
    check_cpu_slots,
    check_disk,
    check_isolation,
    check_shared_memory,
    cpu_slots,
    warn_of_cores,
    warn_of_shared_memory,
)

UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
SEPARATE = {"trainer.v1.trainer_mode": "separate_async", "actor_rollout_ref.rollout.nnodes": 1}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def _left(monkeypatch, free: float) -> None:
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))


@pytest.mark.parametrize(
    ("overrides", "slots"),
    [
        ({"trainer.n_gpus_per_node": 1}, 1 + 9 + 3),
        ({}, 1 + 9 + 3 * 8),
        ({"trainer.nnodes": 2}, 1 + 9 + 3 * 16),
        ({UNITS: 2}, 1 + 3 + 3 * 8),
        ({"trainer.use_v1": False}, 1 + 3 * 8),
        (SEPARATE | {"actor_rollout_ref.rollout.n_gpus_per_node": 4}, 1 + 9 + 3 * 8 + 2 * 4),
        (
            {"reward.reward_model.enable_resource_pool": True, "reward.reward_model.nnodes": 1},
            1 + 9 + 3 * 8 + 3 * 8,
        ),
    ],
)
def test_slots_are_those_that_verl_reserves(overrides, slots):
    assert cpu_slots(changed_config("gsm8k/gpu.yaml", overrides)).total == slots


def test_a_ray_of_our_own_has_a_place_for_all(monkeypatch):
    monkeypatch.setattr(resources, "_cores", lambda: 2)
    config = gpu_config("gsm8k/gpu.yaml")
    assert config.ray_kwargs.ray_init.num_cpus == 34
    assert not list(check_cpu_slots(config))
    assert "this machine has 2 cores for 8 GPU workers" in next(warn_of_cores(config))
    monkeypatch.setattr(resources, "_cores", lambda: 128)
    assert gpu_config("gsm8k/gpu.yaml").ray_kwargs.ray_init.num_cpus == 128
    assert not list(warn_of_cores(config))


def test_too_few_slots_that_the_config_asks_for_are_refused():
    (told,) = check_cpu_slots(gpu_config("gsm8k/gpu.yaml", ray_kwargs__ray_init__num_cpus=33))
    assert told.startswith(
        "ray_kwargs.ray_init.num_cpus=33, and the training reserves 34 CPU slots of Ray: 1 (trainer) + "
    )
    assert "9 (TransferQueue) + 24 (GPU workers)" in told
    assert f"{UNITS}=8" in told
    assert not list(check_cpu_slots(gpu_config("gsm8k/gpu.yaml", ray_kwargs__ray_init__num_cpus=34)))


def test_a_cluster_says_itself_what_it_has(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = gpu_config("gsm8k/gpu.yaml")
    assert config.ray_kwargs.ray_init.num_cpus is None
    assert not [*check_cpu_slots(config), *check_shared_memory(config)]


def test_a_full_disk_is_refused(monkeypatch, tmp_path):
    config = gpu_config(run_dir=str(tmp_path / "not" / "there"))
    _left(monkeypatch, 0.4 * GB)
    problems, _ = check_disk(config, None)
    assert problems[0].startswith(f"run_dir={tmp_path}/not/there: its disk has 0.4 GB left, and a run needs 2")


def test_checkpoints_that_will_not_fit_are_warned_of(monkeypatch):
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    _left(monkeypatch, 200 * GB)
    problems, (warning,) = check_disk(gpu_config(), shape)
    assert not problems
    assert "200 GB left, and 3 checkpoints of about 122 GB" in warning
    assert check_disk(gpu_config(trainer__save_freq=-1), shape) == ([], [])
    _left(monkeypatch, 500 * GB)
    assert check_disk(gpu_config(), shape) == ([], [])


def test_docker_s_shared_memory_is_refused(monkeypatch):
    _left(monkeypatch, 64 * 2**20)
    (told,) = check_shared_memory(gpu_config())
    assert told.startswith("/dev/shm has 0.07 GB left, and NCCL, vLLM and Ray need 1 GB at least; in a container")
    assert not list(check_shared_memory(gpu_config(trainer__device="cpu")))


def test_an_object_store_beyond_shared_memory(monkeypatch):
    _left(monkeypatch, 8 * GB)
    (told,) = check_shared_memory(gpu_config(ray_kwargs__ray_init__object_store_memory=int(20e9)))
    assert "object_store_memory=20.0 GB, and /dev/shm has 8.0 GB left" in told
    with monkeypatch.context() as allowing:
        allowing.setenv("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE", "1")
        assert not list(check_shared_memory(gpu_config(ray_kwargs__ray_init__object_store_memory=int(20e9))))
    smaller = gpu_config(ray_kwargs__ray_init__object_store_memory=int(9e9))
    assert not list(check_shared_memory(smaller))
    assert "lies on a disk" in next(warn_of_shared_memory(smaller))


def test_a_tool_that_needs_a_sandbox_which_is_not_here(monkeypatch):
    monkeypatch.setattr(resources, "strongest", lambda: Isolation(Level.none, missing="no user namespaces"))
    (told,) = check_isolation(load_tools("calculator,python_code"))
    assert told.startswith("tool_server.start: python_code run code in a sandbox: isolation level 'full' is required")
    assert "no user namespaces" in told
    assert "ISOLATION=none of a recipe" in told
    assert not list(check_isolation(load_tools("python_code", None, {"isolation": "none"})))
    assert not list(check_isolation(load_tools("calculator")))


def test_the_sandbox_is_not_tried_where_no_tool_needs_it(monkeypatch):
    monkeypatch.setattr(resources, "strongest", lambda: pytest.fail("tried"))
    assert not list(check_isolation(load_tools("calculator,finish")))


def test_the_real_disk_is_read(tmp_path):
    assert resources.free_bytes(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
