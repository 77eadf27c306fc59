"""The process that holds the trainer. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo.utils import Role

from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker
from verl_tool.agent_workers.masked_loss import MaskedLossWorker
from verl_tool.platforms.patch import plain_class, verl_patch
from verl_tool.trainer.monitoring.abort import aborted_by_watchers
from verl_tool.trainer.ppo.ray_trainer import AgentRayPPOTrainer
from verl_tool.trainer.ppo.v1_trainer import register_agent_trainer
from verl_tool.trainer.preflight.ray_resources import limit_placement_groups, start_transfer_queue

TRAINER = verl_patch(
    "trainer.main_ppo_v0",
    "RayPPOTrainer",
    why="the task runner makes its trainer by this global name; there is no method to override",
    replace=lambda _original: AgentRayPPOTrainer,
)


class _Runner(plain_class(main_ppo_v0.TaskRunner)):  # type: ignore[misc]
    """verl's task runner with our worker."""

    def add_actor_rollout_worker(self, config: DictConfig) -> tuple[type, type]:
        """The worker's class, and that of its group."""
        _, group = super().add_actor_rollout_worker(config)
        mapping: dict[Any, Any] = self.role_worker_mapping
        for role in mapping:
            mapping[role] = ray.remote(AgentActorRolloutRefWorker)
        return AgentActorRolloutRefWorker, group

    def add_critic_worker(self, config: DictConfig) -> None:
        """The critic's worker, if there is a critic."""
        super().add_critic_worker(config)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(MaskedLossWorker)


# Ray sends an actor's inherited methods by value, and with them the classes that they name. The actors below inherit
# nothing, so that they are sent by name.


class AgentTaskRunner:
    """verl's task runner with our trainer and worker (``trainer.use_v1=False``)."""

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        TRAINER.install()
        limit_placement_groups(config.resource_timeout)
        with aborted_by_watchers():
            _Runner().run(config)


class AgentTaskRunnerV1:
    """verl's newer task runner with our trainer and worker (``trainer.use_v1=True``)."""

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        register_agent_trainer(config.trainer.v1.trainer_mode)
        limit_placement_groups(config.resource_timeout)
        with aborted_by_watchers():
            start_transfer_queue(config)
            plain_class(main_ppo.TaskRunnerV1)().run(config)
