"""What a training takes of this machine besides its GPUs: Ray's CPU slots, shared memory, disk, a sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from omegaconf import DictConfig, open_dict
from verl.trainer.distillation import is_distillation_enabled

from verl_tool.errors import VerlToolError
from verl_tool.sandbox.isolation.levels import Level, require, strongest
from verl_tool.servers.serve.local_ray import address_to_join
from verl_tool.servers.tools import Tool
from verl_tool.trainer.preflight.memory import GB
from verl_tool.trainer.preflight.model_shapes import ModelShape
from verl_tool.trainer.preflight.parallelism import replica_size

CPUS_PER_TRAINING_GPU = 3
"""verl: ``ResourcePoolManager.max_colocate_count``, of training, reward and teacher GPUs."""
CPUS_PER_SAMPLING_GPU = 2
"""verl: ``RolloutReplica.init_standalone``, of GPUs that only sample (``separate_async``)."""
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
MIN_FREE_BYTES = 2 * GB
"""Of the run's disk: logs, trajectories, and Ray, which kills its processes on a full one."""
MIN_SHM_BYTES = 1 * GB
"""Of /dev/shm: NCCL's and vLLM's segments and Ray's object store. Docker's default is 64 MB, with which NCCL fails."""
RAY_SLOW_STORAGE_BYTES = 10 * GB
"""Ray refuses an object store above this that /dev/shm cannot hold (``REQUIRE_SHM_SIZE_THRESHOLD``)."""
STATE_BYTES, EXPORT_BYTES = 12, 4
"""Of a parameter in a checkpoint: weights and Adam's moments in fp32, and the model in Hugging Face's form."""
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class GpuPool:
    """Placement groups of one kind that verl asks Ray for; each has all of its GPUs on one node."""

    setting: str
    """The part of the config that sizes it."""
    groups: int
    gpus: int
    """Of a group."""
    cpus_per_gpu: int

    @property
    def cpus(self) -> int:
        """CPU slots of a group."""
        return self.cpus_per_gpu * self.gpus


def gpu_pools(config: DictConfig) -> list[GpuPool]:
    """What verl 0.9.0 and 0.9.1 reserve for this config: GPUs of the trainer, a reward model, teachers, and those that
    only sample."""
    reward, rollout, teacher = config.reward.reward_model, config.actor_rollout_ref.rollout, config.get("distillation")
    own = [("trainer", config.trainer)]
    if reward.enable_resource_pool:
        own.append(("reward.reward_model", reward))
    if is_distillation_enabled(teacher):
        own.append(("distillation", teacher))
    pools = [GpuPool(name, part.nnodes, part.n_gpus_per_node, CPUS_PER_TRAINING_GPU) for name, part in own]
    gpus = rollout.nnodes * rollout.n_gpus_per_node
    if config.trainer.use_v1 and config.trainer.v1.trainer_mode == "separate_async" and gpus:
        group = min(rollout.n_gpus_per_node, replica_size(rollout))  # RolloutReplica.gpus_per_replica_node
        pools.append(GpuPool("actor_rollout_ref.rollout", -(-gpus // group), group, CPUS_PER_SAMPLING_GPU))
    return pools


def sum_gpus(pools: list[GpuPool]) -> int:
    """GPUs of all pools."""
    return sum(pool.groups * pool.gpus for pool in pools)


def describe_gpus(pools: list[GpuPool], name: str = "GPU") -> str:
    """The sum with its terms."""
    terms = " + ".join(f"{pool.groups * pool.gpus} ({pool.setting})" for pool in pools)
    return f"{sum_gpus(pools)} {name}s: {terms}"


@dataclass(frozen=True)
class CpuSlots:
    """CPUs that Ray reserves for a training, by who takes them. They are places, not cores: no actor is held to one.

    Agent-loop workers, reward workers, engines and balancers take none while they run (Ray's default of an actor).
    """

    runner: int
    storage_units: int
    """Of TransferQueue with its own storage."""
    controller: int
    """TransferQueue's, of the newer trainer."""
    gpus: int
    """All groups of GPUs together."""

    @property
    def transfer_queue(self) -> int:
        """The controller and the storage units."""
        return self.controller + self.storage_units

    @property
    def total(self) -> int:
        """All of them."""
        return self.runner + self.transfer_queue + self.gpus

    def describe(self) -> str:
        """The sum with its terms."""
        queue = f" + {self.transfer_queue} (TransferQueue)" if self.transfer_queue else ""
        return f"{self.total} CPU slots of Ray: {self.runner} (trainer){queue} + {self.gpus} (GPU workers)"


def cpu_slots(config: DictConfig) -> CpuSlots:
    """What verl 0.9.0 and 0.9.1 reserve for this config."""
    controller = units = 0
    if config.trainer.use_v1:
        backend, controller = config.transfer_queue.backend, 1
        units = backend.SimpleStorage.num_data_storage_units if backend.storage_backend == "SimpleStorage" else 0
    gpus = sum(pool.groups * pool.cpus for pool in gpu_pools(config))
    return CpuSlots(runner=1, storage_units=units, controller=controller, gpus=gpus)


MIN_CPU_SLOTS = 16
"""Of a Ray of our own; actors that nobody counts find a place, too."""


def joins_cluster(config: DictConfig) -> bool:
    """Whether the training joins a Ray that runs already."""
    return address_to_join(config.ray_kwargs.ray_init.get("address")) is not None


def set_cpu_slots(config: DictConfig) -> None:
    """Let a Ray of our own have a place for all that verl reserves, on a machine with fewer cores too, unless the
    config says how many."""
    provided = config.ray_kwargs.ray_init
    if not joins_cluster(config) and provided.get("num_cpus") is None:
        with open_dict(config):
            provided.num_cpus = max(cpu_slots(config).total, _cores(), MIN_CPU_SLOTS)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def check_cpu_slots(config: DictConfig) -> Iterator[str]:
    """The slots of a Ray of our own; those of a cluster are waited for when it is joined."""
    provided = config.ray_kwargs.ray_init.get("num_cpus")
    needed = cpu_slots(config)
    if provided is not None and not joins_cluster(config) and provided < needed.total:
        fewer = f", or lower {STORAGE_UNITS}={needed.storage_units}" if needed.storage_units > 1 else ""
        yield (
            f"ray_kwargs.ray_init.num_cpus={provided}, and the training reserves {needed.describe()}; it would wait "
            f"for ever. Raise it: slots are no cores, and may be more than there are{fewer}"
        )


def warn_of_cores(config: DictConfig) -> Iterator[str]:
    """Fewer cores than processes that work at once."""
    processes, cores = config.trainer.n_gpus_per_node + 1, _cores()
    if config.trainer.device == "cuda" and not joins_cluster(config) and cores < processes:
        yield (
            f"this machine has {cores} cores for {config.trainer.n_gpus_per_node} GPU workers, their engines, tools "
            "and rewards, which will wait for each other; 8 cores or more per GPU are usual"
        )


def check_disk(config: DictConfig, shape: ModelShape | None) -> tuple[list[str], list[str]]:
    """Problems and warnings of the disks of the run and its checkpoints."""
    problems: list[str] = []
    warnings: list[str] = []
    for setting, folder in (
        ("run_dir", config.run_dir),
        ("trainer.default_local_dir", config.trainer.default_local_dir),
    ):
        free = free_bytes(Path(folder))
        if free < MIN_FREE_BYTES:
            problems.append(
                f"{setting}={folder}: its disk has {free / GB:.1f} GB left, and a run needs {MIN_FREE_BYTES / GB:.0f} "
                "at least; make room, or set RUN to a folder elsewhere"
            )
    if shape is None or config.trainer.save_freq <= 0 or problems:
        return problems, warnings
    one = (STATE_BYTES + EXPORT_BYTES) * shape.parameters
    if config.actor_rollout_ref.model.get("lora_rank", 0):
        # Adam's moments are of the adapter alone.
        one = 2 * EXPORT_BYTES * shape.parameters
    stored, free = (config.trainer.max_actor_ckpt_to_keep or 1) + 1, free_bytes(Path(config.trainer.default_local_dir))
    if free < stored * one:
        warnings.append(
            f"trainer.default_local_dir={config.trainer.default_local_dir}: its disk has {free / GB:.0f} GB left, and "
            f"{stored} checkpoints of about {one / GB:.0f} GB may lie there at a time (one is written before another "
            "is removed); lower KEEP_CHECKPOINTS, set SAVE_FREQ=-1 (the last step alone), or RUN to a folder elsewhere"
        )
    return problems, warnings


def free_bytes(folder: Path) -> float:
    """Bytes that are left where `folder` is or will be."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return float(shutil.disk_usage(there).free)


def check_shared_memory(config: DictConfig) -> Iterator[str]:
    """/dev/shm against what must lie in it. For a Ray of our own: a cluster's is its own."""
    if joins_cluster(config) or not _SHM.is_dir():
        return
    size, store = shutil.disk_usage(_SHM).free, config.ray_kwargs.ray_init.get("object_store_memory")
    remedy = "in a container raise it with docker run --shm-size=64g, or --ipc=host"
    slow_allowed = bool(os.environ.get("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE"))  # as Ray reads it
    if store is not None and store > size and store > RAY_SLOW_STORAGE_BYTES and not slow_allowed:
        yield (
            f"ray_kwargs.ray_init.object_store_memory={store / GB:.1f} GB, and /dev/shm has {size / GB:.1f} GB left; "
            f"lower it, {remedy}, or set RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE=1 to have it on a disk"
        )
    elif config.trainer.device == "cuda" and size < MIN_SHM_BYTES:
        yield (
            f"/dev/shm has {size / GB:.2f} GB left, and NCCL, vLLM and Ray need {MIN_SHM_BYTES / GB:.0f} GB at least; "
            f"{remedy}"
        )


def warn_of_shared_memory(config: DictConfig) -> Iterator[str]:
    """An object store of Ray that would lie on a disk."""
    if config.trainer.device != "cuda" or joins_cluster(config) or not _SHM.is_dir():
        return
    # Ray's default: 30% of the memory, at least 10 GB of it on whatever storage.
    requested = config.ray_kwargs.ray_init.get("object_store_memory") or min(
        0.3 * psutil.virtual_memory().total, RAY_SLOW_STORAGE_BYTES
    )
    size = shutil.disk_usage(_SHM).free
    if MIN_SHM_BYTES <= size < requested:
        yield (
            f"/dev/shm has {size / GB:.1f} GB left, so that Ray's object store of {requested / GB:.1f} GB lies on a "
            "disk, which is slow; in a container raise it with docker run --shm-size=64g"
        )


def check_isolation(tools: list[Tool]) -> Iterator[str]:
    """Whether this machine gives the sandbox that each tool asks for. Tried out once, for the strongest."""
    needs = {tool.name: level for tool in tools if (level := _level_of(tool)) is not None and level > Level.none}
    if not needs:
        return
    try:
        require(strongest(), max(needs.values()))
    except VerlToolError as error:
        yield (
            f"tool_server.start: {', '.join(sorted(needs))} run code in a sandbox: {error}. tool_server.isolation=none "
            "(ISOLATION=none of a recipe) accepts less; or run the tool server on a machine that gives it, and set "
            "TOOL_SERVER_URL"
        )


def _level_of(tool: Tool) -> Level | None:
    """The level below which a tool does not start; None if it needs no sandbox."""
    options = tool.options
    in_container = getattr(options, "backend", "sandbox") != "sandbox"
    if in_container or getattr(options, "replay", None):
        return None
    level = getattr(options, "isolation", None)
    return None if level is None else Level.parse(level)
