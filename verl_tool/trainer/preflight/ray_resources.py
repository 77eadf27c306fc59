"""Ray's CPUs and GPUs before they are claimed, and deadlines for the claims: verl and TransferQueue wait without one.

For a Ray that was started for the run, and for a cluster whose resources others may have taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import wrapt
from omegaconf import DictConfig, open_dict
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_tool.errors import VerlToolError
from verl_tool.platforms.attention import import_problem
from verl_tool.platforms.patch import verl_patch
from verl_tool.trainer.monitoring.abort import TrainingAbortedError, abort_training
from verl_tool.trainer.preflight.resources import (
    STORAGE_UNITS,
    CpuSlots,
    GpuPool,
    cpu_slots,
    describe_gpus,
    gpu_pools,
    sum_gpus,
)

_POLL_SECONDS = 1.0
_QUEUE = ("TransferQueueController", "transfer_queue")
"""Name and Ray namespace of the one controller that a cluster can have."""
_VARIABLES = {"trainer": "NNODES, N_GPUS", "actor_rollout_ref.rollout": "ROLLOUT_NNODES, ROLLOUT_GPUS"}
"""Of a recipe."""


class ResourcesError(VerlToolError):
    """Ray cannot give what the training asks for."""


class ClaimTimeoutError(TrainingAbortedError):
    """Ray did not give in time what the training asked for."""


def wait_for_resources(config: DictConfig) -> None:
    """Return when the Ray that was joined has free what the training is about to claim.

    Raises ResourcesError at once if its nodes can never give it, and after ``resource_timeout`` seconds if others hold
    it.
    """
    slots, pools = cpu_slots(config), gpu_pools(config)
    _check_nodes(config, slots, pools)
    deadline = time.monotonic() + config.resource_timeout
    while lacking := _lacking(config, slots, pools):
        if time.monotonic() > deadline:
            raise ResourcesError(
                f"{lacking} after resource_timeout={config.resource_timeout:g} s; free now: {describe_free()}. Wait "
                "for the other jobs of this cluster or end them, add nodes, or raise resource_timeout"
            )
        time.sleep(_POLL_SECONDS)


def wait_until_started(runner: Any, config: DictConfig) -> None:
    """Return when the trainer's actor runs. Raises ResourcesError after ``resource_timeout`` seconds."""
    try:
        ray.get(runner.__ray_ready__.remote(), timeout=config.resource_timeout)
    except GetTimeoutError:
        raise ResourcesError(
            "Ray did not start the trainer's process, which takes 1 CPU slot, within "
            f"resource_timeout={config.resource_timeout:g} s; free now: {describe_free()}. Wait for the other jobs of "
            "this cluster or end them, or raise resource_timeout"
        ) from None


def import_problem_of_nodes(module: str, config: DictConfig) -> str | None:
    """`import_problem` of the first node with GPUs that has one. Raises ResourcesError if a node does not answer."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    name = _gpu_name([node["Resources"] for node in nodes])
    ask = ray.remote(num_cpus=0)(import_problem)
    answers = {
        node["NodeManagerHostname"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(module)
        for node in nodes
        if node["Resources"].get(name, 0)
    }
    for host, answer in answers.items():
        try:
            problem = ray.get(answer, timeout=config.resource_timeout)
        except GetTimeoutError:
            raise ResourcesError(
                f"node {host} of the cluster did not say within resource_timeout={config.resource_timeout:g} s whether "
                f"it can import {module}; see its Ray logs, or raise resource_timeout"
            ) from None
        if problem is not None:
            return f"on node {host} {problem}"
    return None


def _check_nodes(config: DictConfig, slots: CpuSlots, pools: list[GpuPool]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if cpus < slots.total:
        fewer = f", or lower {STORAGE_UNITS}" if slots.storage_units > 1 else ""
        raise ResourcesError(
            f"the training reserves {slots.describe()}, and Ray's {len(nodes)} nodes have {cpus:g} in all; start nodes "
            f"with more (ray start --num-cpus=N: slots are no cores, and may be more than there are){fewer}"
        )
    name = _gpu_name(nodes)
    for pool in pools:
        fit = sum(min(node.get(name, 0) // pool.gpus, node.get("CPU", 0) // pool.cpus) for node in nodes)
        if fit < pool.groups:
            raise ResourcesError(
                f"{pool.setting} needs {pool.groups} times {pool.gpus} {name}s and {pool.cpus} CPU slots on one node, "
                f"and Ray's {len(nodes)} nodes have that {fit:g} times ({_by_node(nodes, name)}); change "
                f"{pool.setting}.nnodes or .n_gpus_per_node ({_VARIABLES.get(pool.setting, 'on the command line')}), "
                "or start nodes with ray start --num-gpus=N --num-cpus=N"
            )
    gpus, found = sum_gpus(pools), sum(node.get(name, 0) for node in nodes)
    if found < gpus:
        raise ResourcesError(
            f"the training needs {describe_gpus(pools, name)}, and Ray's {len(nodes)} nodes have {found:g} in all "
            f"({_by_node(nodes, name)}); take fewer, or add nodes"
        )
    _check_storage_nodes(config, slots.storage_units, nodes)


def _check_storage_nodes(config: DictConfig, units: int, nodes: list[dict[str, float]]) -> None:
    """TransferQueue puts a storage unit on each node in turn, but on those that lack a resource."""
    if not units:
        return
    resource = _storage_resource(config)
    hosts = [node.get("CPU", 0) for node in nodes if node.get(resource, 0) > 0]
    if not hosts:
        raise ResourcesError(
            f"transfer_queue.backend.SimpleStorage.required_node_resource={resource}, and none of Ray's {len(nodes)} "
            "nodes has it; leave it out, or start nodes with ray start --resources"
        )
    each = units // len(hosts)
    if min(hosts) < each:
        raise ResourcesError(
            f"{STORAGE_UNITS}={units} puts at least {each} storage units, a CPU slot each, on each of {len(hosts)} "
            f"nodes, and one has {min(hosts):g}; lower it, or start that node with --num-cpus={each + 1} or more, or 0"
        )


def _storage_resource(config: DictConfig) -> str:
    """What a node must have for a storage unit: CPU slots, unless the config says more. Heads often have none."""
    return str(config.transfer_queue.backend.SimpleStorage.get("required_node_resource") or "CPU")


def _gpu_name(nodes: list[dict[str, float]]) -> str:
    return "NPU" if any("NPU" in node for node in nodes) else "GPU"


def _by_node(nodes: list[dict[str, float]], name: str) -> str:
    return "; ".join(f"{node.get(name, 0):g} {name}s, {node.get('CPU', 0):g} CPUs" for node in nodes)


def _lacking(config: DictConfig, slots: CpuSlots, pools: list[GpuPool]) -> str:
    """What is not free, in words; empty if all is."""
    free = ray.available_resources()
    name = _gpu_name([free])
    if free.get("CPU", 0) < slots.total:
        server = " (the run's tool server takes one for each replica)" if config.tool_server.start is not None else ""
        return f"the training reserves {slots.describe()}, and {free.get('CPU', 0):g} were free{server}"
    if free.get(name, 0) < sum_gpus(pools):
        return f"the training needs {describe_gpus(pools, name)}, and {free.get(name, 0):g} were free"
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
    """What Ray has free of what it has, in words; part of errors, so it raises none."""
    try:
        free, total = ray.available_resources(), ray.cluster_resources()
    except Exception as error:  # noqa: BLE001 - a Ray that is ending raises all sorts of
        return f"unknown ({type(error).__name__}: {error})"
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

    queue, units = config.transfer_queue, cpu_slots(config).storage_units
    with open_dict(queue):
        queue.enable = True
        queue.backend.SimpleStorage.required_node_resource = _storage_resource(config)
    storage = (
        f" and {units} storage units a CPU slot each" if units else f" ({queue.backend.storage_backend}) a CPU slot"
    )
    with claim_deadline(config, f"TransferQueue's controller{storage}"):
        transfer_queue.init(queue)


def _with_deadline(original: Any, seconds: float) -> Any:
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


PLACEMENT_GROUP = verl_patch(
    "single_controller.ray.base",
    "placement_group",
    why="it waits for its groups without a deadline, by this global name",
    replace=lambda original: original,
)
"""Installed with the seconds of a config."""


def limit_placement_groups(seconds: float) -> None:
    """Give each placement group that verl asks for a deadline: `RayResourcePool` waits for all of them without one."""
    limited = replace(PLACEMENT_GROUP, replace=lambda original: _with_deadline(original, seconds))
    limited.install()
