"""verl's trainers that keep the batch in TransferQueue (``trainer.use_v1=True``), with tools.

Written for verl 0.9.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, get_trainer_cls

from verl_tool.agent_workers.detached_workers import AgentDetachActorWorker
from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker
from verl_tool.errors import VerlToolError
from verl_tool.trainer.engine_watch import EngineWatch
from verl_tool.trainer.metric_limits import MetricWatch
from verl_tool.trainer.ppo.rollout_log import rollout_log
from verl_tool.trainer.ppo.rollout_results import rollout_results
from verl_tool.trainer.ppo.spoilt import spoilt_rows
from verl_tool.trainer.ppo.validation import counted, told_by_source
from verl_tool.trainer.progress import Progress
from verl_tool.trainer.progress_board import Phase


class NoSignalError(VerlToolError):
    """Group after group was filtered out: the model solves all of a problem's samples or none."""


class AgentTrainerMixin(PPOTrainer):
    """What tools add to any of verl's newer trainers."""

    def __init__(self, config: DictConfig) -> None:
        self._rollouts = rollout_log(config)
        self._progress = Progress(config.stall_timeout)
        self._watch = MetricWatch(config.metric_limits)
        self._asked = 0
        super().__init__(config)

    def _setup(self) -> None:
        super()._setup()
        managers = [self.llm_server_manager, getattr(self, "standalone_server_manager", None)]
        EngineWatch([address for manager in managers if manager for address in manager.get_addresses()]).start()

    def _build_replay_buffer(self) -> Any:
        return _WatchedBuffer(super()._build_replay_buffer(), self._on_sampled)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        separate = self.config.trainer.v1.trainer_mode == "separate_async"
        worker = AgentDetachActorWorker if separate else AgentActorRolloutRefWorker
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(worker)

    def on_step_begin(self) -> None:
        """A step begins with its rollout."""
        expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        self._progress.begin(Phase.ROLLOUT, self.global_steps, self.total_training_steps, expected)
        self._asked = self.config.data.train_batch_size
        super().on_step_begin()

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replace groups that were filtered out. Raises NoSignalError behind `max_num_gen_batches` of a step."""
        self._asked += num_prompts
        filters, batch = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        if filters.enable and 0 < filters.max_num_gen_batches * batch < self._asked:
            raise NoSignalError(
                f"step {self.global_steps} needs more than algorithm.filter_groups.max_num_gen_batches="
                f"{filters.max_num_gen_batches} batches of {batch} prompts to find {batch} groups whose "
                f"{filters.metric!r} differs; take easier or harder problems, more samples a prompt "
                "(actor_rollout_ref.rollout.n), or raise the limit"
            )
        self._progress.expect(num_prompts * self.config.actor_rollout_ref.rollout.n)
        return int(super()._add_prompts_to_generate(num_prompts))

    def _on_sampled(self, batch: KVBatchMeta, step: int, partition: str) -> None:
        told = _told_by_loop(batch)
        rewards = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores"])
        sums = [row.sum().item() for row in rewards["rm_scores"].unbind()] if "rm_scores" in rewards else None
        validation = partition == "val"
        self._rollouts.add([row["trajectory"] for row in told], sums, step, validation=validation)
        if not validation:
            right = [row.get("reward_extra_info", {}).get("acc") for row in told]
            self._progress.tell(rollout_results(self._rollouts.metrics, sums, right, _spoilt_of(told)))
            self._progress.begin(Phase.UPDATE, self.global_steps, self.total_training_steps)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        spoilt = _spoilt_of(_told_by_loop(batch))
        if not any(spoilt):
            return super()._compute_advantage(batch, metrics)
        if not all(spoilt):
            super()._compute_advantage(_part(batch, [not row for row in spoilt]), metrics)
        _put_zeros(_part(batch, spoilt), with_rewards=self.config.algorithm.use_kl_in_reward)
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(self._rollouts.take_metrics() | self._progress.take_metrics())
        self._watch.look(metrics, self.global_steps)

    def _validate(self) -> dict[str, Any]:
        expected = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        self._progress.begin(Phase.VALIDATION, self.global_steps, self.total_training_steps, expected)
        metrics = super()._validate()
        self._progress.tell(told_by_source(metrics))
        self._progress.end()
        return metrics | self._progress.take_metrics()

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return counted(super()._val_metrics_update, *args, **kwargs) | self._rollouts.take_validation_metrics()


def register_agent_trainer(mode: str) -> None:
    """Make verl take its trainer of this `trainer.v1.trainer_mode` with `AgentTrainerMixin` added, in this process."""
    stock = get_trainer_cls(mode)
    if not issubclass(stock, AgentTrainerMixin):
        TRAINER_REGISTRY[mode] = type(f"Agent{stock.__name__}", (AgentTrainerMixin, stock), {})


class _WatchedBuffer:
    """verl's replay buffer, of which each sample is shown to somebody first."""

    def __init__(self, buffer: Any, show: Callable[[KVBatchMeta, int, str], None]) -> None:
        self._buffer, self._show = buffer, show

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's only use of a replay buffer."""
        batch, metrics = self._buffer.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        self._show(batch, global_steps, partition_id)
        return batch, metrics


def _told_by_loop(batch: KVBatchMeta) -> list[dict[str, Any]]:
    fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    # `fields[name]` would give a list of another kind.
    rows: list[dict[str, Any]] = fields.pop("extra_fields").tolist()
    return rows


def _spoilt_of(told: list[dict[str, Any]]) -> list[bool]:
    rows = [row | row.get("reward_extra_info", {}) for row in told]
    return [spoilt_rows({name: [value] for name, value in row.items()}, 1)[0] for row in rows]


def _part(batch: KVBatchMeta, wanted: list[bool]) -> KVBatchMeta:
    rows = [i for i, want in enumerate(wanted) if want]
    return KVBatchMeta(
        keys=[batch.keys[i] for i in rows],
        tags=[batch.tags[i] for i in rows],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def _put_zeros(batch: KVBatchMeta, *, with_rewards: bool) -> None:
    """Advantages and returns of 0, and a mask that keeps every token out of the loss."""
    fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    rows = fields["response_mask"].unbind()
    numbers = torch.nested.as_nested_tensor([torch.zeros(len(row)) for row in rows], layout=torch.jagged)
    masks = torch.nested.as_nested_tensor([torch.zeros_like(row) for row in rows], layout=torch.jagged)
    names = ["advantages", "returns"] + (["token_level_rewards"] if with_rewards else [])
    tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(
            {name: numbers.clone() for name in names} | {"response_mask": masks, "loss_mask": masks.clone()},
            batch_size=len(rows),
        ),
    )
