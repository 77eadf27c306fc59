"""Imported by the template: what the processes of a training import, patches first as in each of them."""

from __future__ import annotations

import gc
import os
from importlib import import_module

import setproctitle
from ray import _raylet
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from verl_tool.platforms import vllm_plugin

# Read by vLLM and others while they are imported.
os.environ.update(get_ppo_ray_runtime_env()["env_vars"])
vllm_plugin.register()
for name in (
    "ray._private.workers.default_worker",
    "verl_tool.trainer.task_runner",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "verl_tool.agent_loop.verl.agent_loop",
    "verl.experimental.reward_loop.reward_loop",
):
    import_module(name)
# A process's title lies where its arguments do, which only one of two libraries can write over: Ray's, which has begun.
setproctitle.setproctitle = _raylet.setproctitle  # type: ignore[attr-defined]
# Pages that the garbage collector leaves alone stay shared.
gc.collect()
gc.freeze()
