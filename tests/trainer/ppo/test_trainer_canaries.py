"""What our trainers rely on in verl, told by a digest of its source in each version that is supported.

A failure here means: verl's code has changed. Read what changed, see whether our override is still called and still
right, and write down the new digest.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from importlib.metadata import version

import pytest

pytest.importorskip("verl")

from verl.trainer import main_ppo, main_ppo_v0

from verl_tool.platforms.patch import plain_class
from verl_tool.trainer.ppo.ray_trainer import ADVANTAGE
from verl_tool.trainer.task_runner import TRAINER

RELIED_ON = {
    # Calls generate_sequences and _val_metrics_update.
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._validate": "61b7f39d3b058405",
    # Calls _compute_advantage and _compute_metrics, which AgentTrainerMixin overrides.
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once": "efdd4abe161c6dee",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage": "2a4a2aa4a475b228",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._evict_terminal_groups": "c2c224967f20c54b",
    # Stores the loop's extra fields and `as_dict`.
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.__init__": "9f1e99d66170d332",
    # Builds the loss that we put statistics around.
    "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn": "a655a9cfc08a64fd",
}
VERL = version("verl")
RELIED_ON |= {
    "0.9.0": {
        # Calls compute_advantage by its global name, and the methods that AgentRayPPOTrainer overrides.
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit": "0327d8a22e47da86",
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr": "f7d070c560a19f52",
        # Its parameters are those of AgentTrainerMixin._val_metrics_update.
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._val_metrics_update": "895efd293253c94f",
        # VerlToolAgentLoop sets its attributes in its place.
        "verl.experimental.agent_loop.agent_loop:AgentLoopBase.__init__": "9bce76e11b5fc452",
        # Makes our agent loop and passes the row's columns.
        "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop": "46f1af635d13854a",
        # Calls _acquire_server, which SoleEngineClient and ChangingEnginesClient override, and _release_server.
        "verl.workers.rollout.llm_server:LLMServerClient.generate": "f3cbc4911ea2e439",
        "verl.workers.rollout.llm_server:LLMServerClient._acquire_server": "79999f62e95044f9",
        # Evicts prompts of which a rollout raised, and asks for others.
        "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.sample": "a12544fcf509cd78",
    },
    "0.9.1": {
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit": "2cd5b737f76215aa",
        # A role Actor, which samples nothing, with actor_rollout_ref.hybrid_engine=false.
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr": "9eaa3bab711e4deb",
        # Adds trajectories that did not come as wrong answers.
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._val_metrics_update": "8cecd418b5011bfc",
        # Calls _add_prompts_to_generate before the first step.
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._add_async_warmup_batches": "2f4f246a2c347052",
        "verl.experimental.agent_loop.agent_loop:AgentLoopBase.__init__": "8d0c1cd056eaeeec",
        "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop": "32c3d607c5d4c9fa",
        "verl.workers.rollout.llm_server:LLMServerClient.generate": "45f4cf4029f0be37",
        "verl.workers.rollout.llm_server:LLMServerClient._acquire_server": "4afa9eaba4c5c436",
        # Its loop is in the second, which separate_async calls too.
        "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.sample": "d31f3d3955ec5cfd",
        "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.wait_for_sampleable": "5590a1b06f671763",
    },
}[VERL]


def digest(found: object) -> str:
    return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]


@pytest.mark.parametrize("where", RELIED_ON)
def test_source_is_what_we_wrote_for(where):
    module, name = where.split(":")
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    assert digest(found) == RELIED_ON[where]


@pytest.mark.parametrize(
    ("actor", "expected"), [(main_ppo_v0.TaskRunner, "95ebfb4a9286d46a"), (main_ppo.TaskRunnerV1, "26be986901db888b")]
)
def test_task_runners_are_what_we_wrote_for(actor, expected):
    """They make the trainer by a global name (v0) or from the registry (v1)."""
    assert digest(plain_class(actor).run) == expected


def test_a_prompt_s_rollouts_are_run_as_we_wrote_for():
    """It calls _run_agent_loop, which RolloutWorker overrides, and keeps the prompt's other tags."""
    worker = plain_class(importlib.import_module("verl.trainer.ppo.v1.agent_loop_tq").AgentLoopWorkerTQ)
    assert digest(worker._run_prompt) == "3d9bca6b0ea5fe25"


@pytest.mark.parametrize("patch", [ADVANTAGE, TRAINER], ids=lambda patch: patch.attribute)
def test_what_is_replaced_is_there(patch):
    assert patch.attribute in vars(importlib.import_module(patch.module))
    assert patch.versions.contains(VERL)
