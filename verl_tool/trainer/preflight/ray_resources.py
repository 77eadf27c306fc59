"""Ray's CPUs and GPUs before they are claimed, and deadlines for the claims: verl and TransferQueue wait without one.

For a Ray that was started for the run, and for a cluster whose resources others may have taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import wrapt
from omegaconf import DictConfig

from verl_tool.errors import VerlToolError
from verl_tool.platforms.patch import verl_patch
from verl_tool.trainer.monitoring.abort import TrainingAbortedError, abort_training
from verl_tool.trainer.preflight.parallelism import world_size
from verl_tool.trainer.preflight.resources import CpuSlots, cpu_slots

_POLL_SECONDS = 1.0
_QUEUE = ("TransferQueueController", "transfer_queue")
"""Name and Ray namespace of the one controller that a cluster can have."""


class ResourcesError(VerlToolError):
    """Ray cannot give what the training asks for."""


class ClaimTimeoutError(TrainingAbortedError):
    """Ray did not give in time what the training asked for."""


def wait_for_resources(config: DictConfig) -> None:
    """Return when the Ray that was joined has free what the training is about to claim.

    Raises ResourcesError at once if its nodes can never give it, and after ``resource_timeout`` seconds if others hold
    it.
    """
    slots, gpus = cpu_slots(config), world_size(config)
    _check_nodes(config, slots, gpus)
    deadline = time.monotonic() + config.resource_timeout
    while lacking := _lacking(config, slots, gpus):
        if time.monotonic() > deadline:
            raise ResourcesError(
                f"{lacking} after resource_timeout={config.resource_timeout:g} s; free now: {describe_free()}. Wait "
                "for the other jobs of this cluster or end them, add nodes, or raise resource_timeout"
            )
        time.sleep(_POLL_SECONDS)


def _check_nodes(config: DictConfig, slots: CpuSlots, gpus: int) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if cpus < slots.total:
        raise ResourcesError(
            f"the training reserves {slots.describe()}, and Ray's {len(nodes)} nodes have {cpus:g} in all; start nodes "
            "with more (ray start --num-cpus=N: slots are no cores, and may be more than there are), or lower "
            "transfer_queue.backend.SimpleStorage.num_data_storage_units"
        )
    of_node, name = config.trainer.n_gpus_per_node, _gpu_name(nodes)
    fit = [node for node in nodes if node.get(name, 0) >= of_node and node.get("CPU", 0) >= slots.largest_bundle]
    if len(fit) < config.trainer.nnodes:
        raise ResourcesError(
            f"trainer.nnodes={config.trainer.nnodes} nodes with {of_node} {name}s and {slots.largest_bundle} CPU slots "
            f"each are needed, and {len(fit)} of Ray's {len(nodes)} nodes have them ({_by_node(nodes, name)}); change "
            "nnodes (NNODES) or trainer.n_gpus_per_node (N_GPUS), or start nodes with ray start --num-gpus=N "
            "--num-cpus=N"
        )
    units = slots.transfer_queue - 1
    empty = [node for node in nodes if not node.get("CPU", 0)]
    if units > 0 and empty:
        raise ResourcesError(
            f"{len(empty)} of Ray's {len(nodes)} nodes have no CPU slot, and TransferQueue puts a storage unit on each "
            "node in turn; start them with --num-cpus=1 or more"
        )


def _gpu_name(nodes: list[dict[str, float]]) -> str:
    return "NPU" if any("NPU" in node for node in nodes) else "GPU"


def _by_node(nodes: list[dict[str, float]], name: str) -> str:
    return "; ".join(f"{node.get(name, 0):g} {name}s, {node.get('CPU', 0):g} CPUs" for node in nodes)


def _lacking(config: DictConfig, slots: CpuSlots, gpus: int) -> str:
    """What is not free, in words; empty if all is."""
    free = ray.available_resources()
    name = _gpu_name([free])
    if free.get("CPU", 0) < slots.total:
        server = " (the run's tool server takes one for each replica)" if config.tool_server.start is not None else ""
        return f"the training reserves {slots.describe()}, and {free.get('CPU', 0):g} were free{server}"
    if free.get(name, 0) < gpus:
        return f"the training needs {gpus} {name}s, and {free.get(name, 0):g} were free"
    if slots.transfer_queue and _other_queue():
        return "another training keeps its batches in this cluster's only TransferQueue, and two would mix theirs"
    return ""


def _other_queue() -> bool:
    try:
        ray.get_actor(_QUEUE[0], namespace=_QUEUE[1])
    except ValueError:
        return False
    return True


def describe_free() -> str:
    """What Ray has free of what it has, in words."""
    free, total = ray.available_resources(), ray.cluster_resources()
    return ", ".join(
        f"{free.get(name, 0):g} of {total[name]:g} {name}s" for name in ("CPU", "GPU", "NPU") if name in total
    )


@contextmanager
def claim_deadline(config: DictConfig, what: str) -> Iterator[None]:
    """Within the block, the training waits for Ray to give it `what`; end it after ``resource_timeout`` seconds.

    For the main thread, within `aborted_by_watchers`, which raises ClaimTimeoutError.
    """
    done, seconds = threading.Event(), config.resource_timeout

    def watch() -> None:
        if not done.wait(seconds):
            abort_training(
                ClaimTimeoutError(
                    f"Ray did not give {what} within resource_timeout={seconds:g} s; the training reserves "
                    f"{cpu_slots(config).describe()}; free now: {describe_free()}. Wait for the other jobs of this "
                    "cluster or end them, raise ray_kwargs.ray_init.num_cpus, or raise resource_timeout"
                )
            )

    thread = threading.Thread(target=watch, name="claim-deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def start_transfer_queue(config: DictConfig) -> None:
    """Start TransferQueue's actors, with a deadline. verl's own `tq.init` finds them."""
    import transfer_queue

    queue = config.transfer_queue
    queue.enable = True
    units = queue.backend.SimpleStorage.num_data_storage_units
    with claim_deadline(config, f"TransferQueue's controller and {units} storage units a CPU slot each"):
        transfer_queue.init(queue)


def limit_placement_groups(seconds: float) -> None:
    """Give each placement group that verl asks for a deadline: `RayResourcePool` waits for all of them without one."""

    def limited(original: Any) -> Any:
        @wrapt.decorator
        def wait(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
            group = wrapped(*args, **kwargs)
            if not group.wait(seconds):
                raise ResourcesError(
                    f"Ray did not give the {len(group.bundle_specs)} bundles {group.bundle_specs[0]} on one node "
                    f"within resource_timeout={seconds:g} s; free now: {describe_free()}. Wait for the other jobs of "
                    "this cluster or end them, or raise resource_timeout"
                )
            return group

        return wait(original)

    verl_patch(
        "single_controller.ray.base",
        "placement_group",
        why="it waits for its groups without a deadline, by this global name",
        replace=limited,
    ).install()
