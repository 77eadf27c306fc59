"""Imported by the template: what the processes of a training import, patches first as in each of them."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from unittest import mock

import ray.actor
import setproctitle
from ray import ActorClassID, _raylet


class _ActorClassID:
    """In place of `ray.actor.ActorClassID`, which draws from the generator of Ray's core.

    That one is made with the first draw and copied by a fork: all processes that are forked after it draw the same ids,
    and of two workers that start at the same moment one dies of the other's object. So nothing may be drawn here.
    """

    @staticmethod
    def from_random() -> ActorClassID:
        """An id for a class that is decorated with `ray.remote` while it is imported."""
        return ActorClassID(os.urandom(ActorClassID.size()))


NAMES = (
    "ray._private.workers.default_worker",
    "verl_tool.trainer.task_runner",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "verl_tool.agent_loop.verl.agent_loop",
    "verl.experimental.reward_loop.reward_loop",
)
with mock.patch.object(ray.actor, "ActorClassID", _ActorClassID):
    # Read by vLLM and others while they are imported.
    os.environ.update(import_module("verl.trainer.constants_ppo").get_ppo_ray_runtime_env()["env_vars"])
    import_module("verl_tool.platforms.vllm_plugin").register()
    for name in NAMES:
        import_module(name)
# A process's title lies where its arguments do, which only one of two libraries can write over: Ray's, which has begun.
setproctitle.setproctitle = _raylet.setproctitle  # type: ignore[attr-defined]
# Pages that the garbage collector leaves alone stay shared.
gc.collect()
gc.freeze()
