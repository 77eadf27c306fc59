"""Extend verl's trainers that keep the batch in TransferQueue (``trainer.use_v1=True``) with tools.

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, get_trainer_cls
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from verl_tool.agent_loop.generators.removed_engine import ChangingEnginesClient
from verl_tool.agent_loop.trajectory import BONUS, RECORD_PLACES
from verl_tool.agent_loop.verl.stored_step import STORED_LINE
from verl_tool.agent_workers.detached_workers import AgentDetachActorWorker
from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker
from verl_tool.agent_workers.masked_loss import NUM_MINI_BATCHES, MaskedLossWorker
from verl_tool.agent_workers.rollout_weights import rollout_weights
from verl_tool.agent_workers.rollout_worker import make_rollout_worker
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.platforms.patch import Patch, verl_patch
from verl_tool.trainer.determinism import SequentialIds
from verl_tool.trainer.monitoring.engine_watch import EngineWatch
from verl_tool.trainer.monitoring.staleness import fresh_rows, oldest_and_newest, probability_difference, versions_of
from verl_tool.trainer.monitoring.token_records import in_record_order
from verl_tool.trainer.ppo.advantage import compares_within_groups, without_invalid
from verl_tool.trainer.ppo.curiosity import curiosity_bonuses, put_bonuses
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory, check_replaced
from verl_tool.trainer.ppo.invalid import singleton_rows
from verl_tool.trainer.ppo.replay import (
    ValidGroupFilter,
    invalid_of,
    make_valid_group_buffer,
    read_loop_fields,
    read_reward_fields,
    rewards_of,
    trajectories_of,
)
from verl_tool.trainer.ppo.rollout_log import TOKENS_TIMER, Rewards, bypasses, rollout_log
from verl_tool.trainer.ppo.rollout_results import rollout_results
from verl_tool.trainer.ppo.rows.joined_rows import JoinedRows, aggregate_on_rollouts, joining, on_rollouts
from verl_tool.trainer.ppo.rows.mini_batches import DUMMY, lay_out
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex, prompt_of
from verl_tool.trainer.ppo.rows.rows_check import COLOCATED_REWARD_MODEL, check_several_rows, rows_multiple
from verl_tool.trainer.ppo.step_report import tracking_patch
from verl_tool.trainer.ppo.turns.turn_columns import takes_turns, with_turns
from verl_tool.trainer.ppo.turns.turn_metrics import variance_share
from verl_tool.trainer.ppo.valid_rows import penalise_rows_in_loss, without_nan, without_rewards
from verl_tool.trainer.ppo.validation import main_results_by_source, summarise_valid
from verl_tool.trainer.progress.progress import Progress
from verl_tool.trainer.progress.progress_board import Phase
from verl_tool.trainer.run_folder.checkpoints import atomic_checkpoint

_SOMETIMES_WRITTEN = ("token_level_rewards", "rollout_is_weights")
"""Fields that verl writes together with the advantages if the config enables them."""


def _patch(module: str, attribute: str, replace: Callable[[Any], Any]) -> Patch:
    why = "the trainer uses it by this global name; there is no method to override"
    return verl_patch(f"trainer.ppo.v1.{module}", attribute, why, replace)


PATCHES = (
    _patch("utils", "compute_advantage", without_invalid),
    _patch(
        "trainer_base", "compute_advantage_for_multi_trajectories", lambda compute: with_turns(on_rollouts(compute))
    ),
    _patch("trainer_base", "compute_rollout_correction_and_add_to_batch", on_rollouts),
    _patch("trainer_base", "apply_kl_penalty", lambda f: on_rollouts(penalise_rows_in_loss(f))),
    _patch("trainer_base", "compute_data_metrics", on_rollouts),
    _patch("trainer_base", "agg_loss", aggregate_on_rollouts),
    _patch("trainer_base", "ReplayBuffer", make_valid_group_buffer),
    _patch("trainer_base", "ReplayBufferAsync", make_valid_group_buffer),
    tracking_patch("trainer.ppo.v1.trainer_base"),
    _patch("agent_loop_tq", "AgentLoopWorkerTQ", make_rollout_worker),
    verl_patch(
        "trainer.ppo.v1.trainer_separate_async",
        "FullyAsyncLLMServerClient",
        "a request that reaches the trainer's engine after its abort is never answered",
        lambda _client: ChangingEnginesClient,
        versions="==0.9.0",
        not_needed="==0.9.1",
    ),
)
IDS = _patch("trainer_base", "uuid", lambda module: module)
"""Patch with which a deterministic trainer replaces the module ``uuid`` by sequential numbers."""


class NoSignalError(VerlToolError):
    """Too many groups were filtered out: the model solves either all of a problem's samples or none."""


class AgentTrainerMixin(PPOTrainer):
    """Adds tools to any of verl's newer trainers."""

    def __init__(self, config: DictConfig) -> None:
        self._rollouts = rollout_log(config)
        self._progress = Progress(config.stall_timeout)
        # Number of prompts requested in this step. Before the first step, during warm-up, no limit applies.
        self._requested = -math.inf
        self._raised: list[str] = []
        # Lines of the records of rows that were sampled but not trained on yet.
        self._lines: dict[str, int] = {}
        self._ids = SequentialIds() if config.deterministic else None
        if self._ids is not None:
            ids = replace(IDS, replace=lambda _module: self._ids)
            ids.install()
        super().__init__(config)

    def _setup(self) -> None:
        super()._setup()
        managers = [self.llm_server_manager, getattr(self, "standalone_server_manager", None)]
        EngineWatch([address for manager in managers if manager for address in manager.get_addresses()]).start()
        # The workers, and so the learning-rate schedule, use the number of steps from the config.
        step = self.config.actor_rollout_ref.replay_step
        if step is not None:
            self.total_training_steps = int(step)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if not self.steps_per_epoch and not self.config.trainer.get("val_only", False):  # verl divides by it
            raise ConfigError(
                f"data.train_batch_size={self.config.data.train_batch_size}, and {len(self.train_dataset)} rows are "
                f"left of data.train_files (data.filter_overlong_prompts={self.config.data.filter_overlong_prompts}, "
                f"data.max_prompt_length={self.config.data.max_prompt_length}): there is no step to train on; lower "
                "the first, raise the last, or make more rows"
            )

    def _build_replay_buffer(self) -> Any:
        return _WatchedBuffer(super()._build_replay_buffer(), self._on_sampled, in_order=self._ids is not None)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        separate = self.config.trainer.v1.trainer_mode == "separate_async"
        worker = AgentDetachActorWorker if separate else AgentActorRolloutRefWorker
        # The last two exist if the actor's process does not sample (verl 0.9.1: actor_rollout_ref.hybrid_engine=false).
        for role in (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(worker)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(MaskedLossWorker)

    def on_train_begin(self) -> None:
        """Fill the queue of prompts in asynchronous modes. A resumed run adds only those that its checkpoint lacks."""
        mode = self.config.trainer.v1.trainer_mode
        restored = 0 if mode == "sync" else _prompts_in_queue()
        # verl 0.9.0 adds all of them, so that the trajectories would become a step older each time a run is resumed.
        if not restored or hasattr(PPOTrainer, "_add_async_warmup_batches"):
            super().on_train_begin()
            return
        missing = int(self.config.trainer.v1[mode].num_warmup_batches) * self.config.data.train_batch_size - restored
        if missing > 0:
            super()._add_prompts_to_generate(missing)

    def on_step_begin(self) -> None:
        """Begin the rollout of a step."""
        expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        self._progress.begin(Phase.ROLLOUT, self.global_steps, self.total_training_steps, expected)
        self._requested = self.config.data.train_batch_size
        self._raised = []
        if self._ids is not None:
            self._ids.begin(self.global_steps, validation=False)
        super().on_step_begin()

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replace groups that were filtered out, or in which a rollout raised.

        Raises TooManyFaultsError if too many raised, and NoSignalError after `max_num_gen_batches` in one step.
        """
        raised, others = self.replay_buffer.take_raised()
        self._raised += raised
        filters, batch = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        check_replaced(self._raised, max(others, batch), self._rollouts.limits.trajectories)
        self._requested += num_prompts
        if filters.enable and 0 < filters.max_num_gen_batches * batch < self._requested:
            raise NoSignalError(
                f"step {self.global_steps} needs more than algorithm.filter_groups.max_num_gen_batches="
                f"{filters.max_num_gen_batches} batches of {batch} prompts to find {batch} groups whose "
                f"{filters.metric!r} differs; use easier or harder problems, more samples per prompt "
                "(actor_rollout_ref.rollout.n), or raise the limit"
            )
        self._progress.expect(num_prompts * self.config.actor_rollout_ref.rollout.n)
        return int(super()._add_prompts_to_generate(num_prompts))

    def _on_sampled(self, batch: KVBatchMeta, step: int, partition: str, prompts: int) -> None:
        if self.config.actor_rollout_ref.replay_step is not None:
            stored = [row[STORED_LINE] for row in read_loop_fields(batch)]
            batch.reorder(sorted(range(len(stored)), key=stored.__getitem__))
        index = RolloutIndex.of(batch.keys)
        keys = [batch.keys[row] for row in index.final]
        fields = read_loop_fields(_select(batch, index.final))
        sums = rewards_of(index, batch.partition_id)
        trajectories = trajectories_of(fields)
        if partition == "val":
            self._rollouts.add(trajectories, sums, step, validation=True, grading=read_reward_fields(fields))
            return
        expected = prompts * self.config.actor_rollout_ref.rollout.n
        rewards = read_reward_fields(fields, [prompt_of(key) for key in keys])
        sums, rewards = self._with_curiosity(keys, batch.partition_id, sums, rewards, invalid_of(fields))
        versions = [versions_of(tag) for tag in batch.tags]
        written = self._rollouts.add(
            trajectories,
            sums,
            step,
            validation=False,
            grading=rewards,
            versions=index.reduce(versions, oldest_and_newest),
            filtered=self.replay_buffer.take_filtered(),
            lost=max(0, expected - len(index)),
        )
        self._lines |= zip(keys, written, strict=True)
        right = [row.get("reward_extra_info", {}).get("acc") for row in fields]
        self._progress.tell(rollout_results(self._rollouts.metrics, sums, right, invalid_of(fields)))
        self._progress.begin(Phase.UPDATE, self.global_steps, self.total_training_steps)

    @staticmethod
    def _with_curiosity(
        keys: list[str], partition_id: str, sums: list[float] | None, rewards: Rewards, out: list[bool]
    ) -> tuple[list[float] | None, Rewards]:
        """Add curiosity bonuses to the rollouts' rewards. Returns the new rewards, and the grading with the bonuses.

        `keys` are those of each rollout's final row.
        """
        columns = rewards.columns or {}
        bonuses = curiosity_bonuses(columns, rewards.groups or [], out)
        if sums is None or not bonuses:
            return sums, rewards
        if any(bonuses):
            put_bonuses(keys, partition_id, bonuses)
        sums = [reward + bonus for reward, bonus in zip(sums, bonuses, strict=True)]
        return sums, replace(rewards, columns={**columns, BONUS: bonuses})

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Balance the ranks' work. With several rows per rollout, lay out mini-batches of whole prompts."""
        index = RolloutIndex.of(batch.keys)
        if not index.has_several:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        counts = [len(rows) for rows in index.rollouts]
        metrics["training/rows_per_rollout/mean"] = sum(counts) / len(counts)
        metrics["training/rows_per_rollout/max"] = max(counts)
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            raise ConfigError(COLOCATED_REWARD_MODEL)
        check_several_rows(self.config)
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        ranks = max(group._dispatch_info["actor"]) + 1
        lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
        prompts = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        work = calculate_workload(lengths).tolist()
        layout = lay_out(
            *(batch.keys, work, prompts, ranks, lambda number: rows_multiple(self.config, number)),
            seed=self.global_steps,
        )
        rows = len(batch.keys)
        padded = upsample_batch_to_divisible_size(batch, len(layout.order), self.tokenizer.eos_token_id)
        dummies = iter(range(rows, len(padded.keys)))
        padded.reorder([next(dummies) if place == DUMMY else place for place in layout.order])
        padded.extra_info[NUM_MINI_BATCHES] = layout.num_mini_batches
        metrics["training/dummy_rows"] = layout.num_dummies
        size = len(layout.order) // ranks
        sizes = [tag["seq_len"] for tag in padded.tags]
        parts = [list(range(rank * size, (rank + 1) * size)) for rank in range(ranks)]
        metrics.update(log_seqlen_unbalance(seqlen_list=sizes, partitions=parts, prefix="global_seqlen"))
        return padded

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with _joining(batch):
            done = super()._compute_old_log_prob(batch, metrics)
        if NUM_MINI_BATCHES in batch.extra_info:  # batches from TransferQueue have no extra information
            done.extra_info[NUM_MINI_BATCHES] = batch.extra_info[NUM_MINI_BATCHES]
        recomputed = self.config.actor_rollout_ref.rollout.calculate_log_probs and not bypasses(self.config)
        if recomputed and self.config.trainer.v1.trainer_mode != "sync":
            metrics.update(_fresh_difference(done, self.global_steps - 1))
        return done

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        done = self._advantages_of_valid_rows(batch, metrics)
        index = RolloutIndex.of(batch.keys)
        if index.has_several:
            done = _put_weights(batch, done, index)
        metrics.update(self._store_tokens(batch))
        if takes_turns(self.config.algorithm.adv_estimator):
            names = ["advantages", "response_mask"]
            fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
            columns = [fields.to_padded_tensor()[name] for name in names]
            if index.has_several:
                joined = JoinedRows(index, _response_lengths(batch))
                columns = [joined.join(column) for column in columns]
            metrics.update(variance_share(*columns))
        return done

    def _store_tokens(self, batch: KVBatchMeta) -> dict[str, float]:
        """Write the step's token records, if they are due. Returns the time that it took, as a metric."""
        lines, self._lines = self._lines, {}
        index = RolloutIndex.of(batch.keys)
        # Padding rows have no record.
        rollouts = [rows for rows in index.rollouts if batch.keys[rows[-1]] in lines]
        keys = [batch.keys[row] for rows in rollouts for row in rows]
        if not keys or not self._rollouts.tokens.is_due(self.global_steps):
            return {}
        began = time.perf_counter()
        names = {"advantages": "advantages", "mask": "response_mask"}
        if not bypasses(self.config):
            names["log_probs"] = "old_log_probs"
        fields = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(names.values()))
        tokens = {name: [row.float().numpy() for row in fields[field].unbind()] for name, field in names.items()}
        if index.has_several:
            rows = [row for each in rollouts for row in each]
            known = [row.get(RECORD_PLACES) for row in read_loop_fields(_select(batch, rows))]
            lengths = [len(row) for row in fields["response_mask"].unbind()]
            places = [own or [(0, length)] for own, length in zip(known, lengths, strict=True)]
            counts = [len(each) for each in rollouts]
            tokens = {name: in_record_order(columns, places, counts) for name, columns in tokens.items()}
        finals = [batch.keys[rows[-1]] for rows in rollouts]
        self._rollouts.tokens.add(self.global_steps, [lines[key] for key in finals], tokens)
        return {TOKENS_TIMER: time.perf_counter() - began}

    def _advantages_of_valid_rows(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        valid = self._find_valid(batch)
        if all(valid):
            with _joining(batch):
                return super()._compute_advantage(batch, metrics)
        fields = list(batch.fields or [])
        if any(valid):
            part = _part(batch, valid)
            with _joining(part):
                fields = super()._compute_advantage(part, metrics).fields
        put = _put_zeros(_part(batch, [not row for row in valid]), fields)
        fields = fields if any(valid) else put.fields
        return KVBatchMeta(
            keys=batch.keys,
            tags=batch.tags,
            partition_id=batch.partition_id,
            fields=fields,
            extra_info=batch.extra_info,
        )

    def _find_valid(self, batch: KVBatchMeta) -> list[bool]:
        """Return which rows get advantages: all except invalid rows, padding and singletons."""
        valid_rows = [not out for out in _uninformative_rows(batch)]
        if not compares_within_groups(self.config.algorithm.adv_estimator):
            return valid_rows
        index = RolloutIndex.of(batch.keys)
        groups = [prompt_of(batch.keys[row]) for row in index.final]
        valid = [valid_rows[row] for row in index.final]
        singletons = singleton_rows(groups, valid, self.config.actor_rollout_ref.rollout.n)
        return index.spread([row and not alone for row, alone in zip(valid, singletons, strict=True)])

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        out = _uninformative_rows(batch)
        # Neither padding nor rows without a reward are in the means.
        tags = [tag | {"is_padding": True} if row else tag for tag, row in zip(batch.tags, out, strict=True)]
        tagged = batch if all(out) else _retag(batch, tags)
        with _joining(batch if all(out) else _part(batch, [not row for row in out])):
            super()._compute_metrics(tagged, metrics, *args, **kwargs)
        index = RolloutIndex.of(batch.keys)
        if index.has_several and not all(out):
            finals = [batch.keys[row] for row in index.final if not out[row]]
            fields = tq.kv_batch_get(keys=finals, partition_id=batch.partition_id, select_fields=["num_turns"])
            turns = torch.tensor(fields.pop("num_turns").tolist(), dtype=torch.float32)
            for name in ("mean", "max", "min"):
                metrics[f"training/num_turns/{name}"] = getattr(turns, name)().item()
        cleaned = without_nan(without_rewards(metrics) if all(out) else metrics)
        metrics.clear()
        metrics.update(cleaned | self._rollouts.take_metrics() | self._progress.take_metrics())

    def _save_checkpoint(self) -> None:
        with atomic_checkpoint(Path(self.config.trainer.default_local_dir), self.global_steps):
            super()._save_checkpoint()

    def _validate(self) -> dict[str, Any]:
        if self._ids is not None:
            self._ids.begin(self.global_steps, validation=True)
        expected = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        self._progress.begin(Phase.VALIDATION, self.global_steps, self.total_training_steps, expected)
        metrics = super()._validate()
        self._progress.tell(main_results_by_source(metrics))
        self._progress.end()
        return metrics | self._progress.take_metrics()

    def _val_metrics_update(
        self, *args: Any, expected_acc_counts: Mapping[tuple[str, str], int] | None = None
    ) -> dict[str, Any]:
        # With `expected_acc_counts`, verl 0.9.1 would count missing rows, also those without a reward, as wrong.
        return summarise_valid(super()._val_metrics_update, *args) | self._rollouts.take_validation_metrics()


def register_agent_trainer(mode: str) -> None:
    """Add `AgentTrainerMixin` to verl's trainer of this `trainer.v1.trainer_mode`, in this process."""
    for patch in PATCHES:
        patch.install()
    stock = get_trainer_cls(mode)
    if not issubclass(stock, AgentTrainerMixin):
        TRAINER_REGISTRY[mode] = type(f"Agent{stock.__name__}", (AgentTrainerMixin, stock), {})


class _WatchedBuffer:
    """verl's replay buffer with a callback for each sample."""

    def __init__(
        self, buffer: Any, on_sample: Callable[[KVBatchMeta, int, str, int], None], *, in_order: bool = False
    ) -> None:
        """`in_order` sorts rows by their keys; by default they come in the order in which they were finished."""
        self._buffer, self._on_sample, self._in_order = buffer, on_sample, in_order

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample a batch. verl uses other methods only for `trainer.v1.separate_async.hybrid_rollout`."""
        batch, metrics = self._buffer.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if self._in_order:
            batch.reorder(sorted(range(len(batch)), key=lambda row: _sort_key(batch.keys[row])))
        self._on_sample(batch, global_steps, partition_id, batch_size)
        return batch, metrics

    def __getattr__(self, name: str) -> Any:
        # verl 0.9.1 also counts groups in a buffer, and waits for them.
        return getattr(self._buffer, name)

    def take_raised(self) -> tuple[list[str], int]:
        """Return the errors as in `ValidGroupFilter.take_raised`, and the number of other prompts."""
        if not isinstance(self._buffer, ValidGroupFilter):
            return [], 0
        return self._buffer.take_raised(), self._buffer.prompts_there("train")

    def take_filtered(self) -> list[GradedTrajectory]:
        """Return trajectories that were dropped with their groups since the last call."""
        filtered: list[GradedTrajectory] = (
            self._buffer.take_filtered() if isinstance(self._buffer, ValidGroupFilter) else []
        )
        return filtered


def _sort_key(key: str) -> tuple[str, int, int]:
    """Split a row's key for sorting by prompt, sample and output."""
    prompt, sample, output = key.rsplit("_", 2)
    return prompt, int(sample), int(output)


def _uninformative_rows(batch: KVBatchMeta) -> list[bool]:
    """Return which rows are padding, or belong to a rollout with an invalid row."""
    index = RolloutIndex.of(batch.keys)
    invalid = index.spread(index.reduce(invalid_of(read_loop_fields(batch)), any))
    return [out or bool(tag.get("is_padding")) for out, tag in zip(invalid, batch.tags, strict=True)]


def _prompts_in_queue() -> int:
    """Count the training prompts that a checkpoint has restored."""
    tags = (tq.kv_list("train") or {}).get("train", {})
    return sum(bool(tag.get("is_prompt")) for tag in tags.values())


def _fresh_difference(batch: KVBatchMeta, trained_version: int) -> dict[str, float]:
    """Compare engine and trainer on rows that the trained weights sampled. Returns nothing if there are none."""
    keys = [batch.keys[row] for row in fresh_rows(batch.tags, trained_version)]
    if not keys:
        return {}
    names = ["old_log_probs", "rollout_log_probs", "response_mask"]
    fields = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)
    trainer, engine, masks = (fields[name].unbind() for name in names)
    return probability_difference(trainer, engine, masks)


def _part(batch: KVBatchMeta, mask: list[bool]) -> KVBatchMeta:
    return _select(batch, [i for i, selected in enumerate(mask) if selected])


def _select(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    return KVBatchMeta(
        keys=[batch.keys[i] for i in rows],
        tags=[batch.tags[i] for i in rows],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def _retag(batch: KVBatchMeta, tags: list[dict[str, Any]]) -> KVBatchMeta:
    return KVBatchMeta(
        keys=batch.keys, tags=tags, partition_id=batch.partition_id, fields=batch.fields, extra_info=batch.extra_info
    )


def _response_lengths(batch: KVBatchMeta) -> list[int]:
    return [int(tag["response_len"]) for tag in batch.tags]


def _joining(batch: KVBatchMeta) -> AbstractContextManager[None]:
    index = RolloutIndex.of(batch.keys)
    return joining(index, _response_lengths(batch)) if index.has_several else nullcontext()


def _put_weights(batch: KVBatchMeta, done: KVBatchMeta, index: RolloutIndex) -> KVBatchMeta:
    """Add the weights of rows in the loss to `done`; see `rollout_weights`."""
    fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    tokens = torch.stack([row.sum() for row in fields["response_mask"].unbind()])
    weights = TensorDict(dict(rollout_weights(index.rollout_by_row, tokens)), batch_size=len(tokens))
    written = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=weights)
    return KVBatchMeta(
        keys=batch.keys,
        tags=batch.tags,
        partition_id=batch.partition_id,
        fields=sorted({*(done.fields or ()), *(written.fields or ())}),
        extra_info=batch.extra_info,
    )


def _put_zeros(batch: KVBatchMeta, written: Collection[str]) -> KVBatchMeta:
    """Write advantages and returns of 0, and a mask that keeps every token out of the loss.

    Other fields that were `written` for the other rows are set too, since all rows of a batch must have the same
    fields.
    """
    fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    rows = fields["response_mask"].unbind()
    numbers = torch.nested.as_nested_tensor([torch.zeros(len(row)) for row in rows], layout=torch.jagged)
    masks = torch.nested.as_nested_tensor([torch.zeros_like(row) for row in rows], layout=torch.jagged)
    names = ["advantages", "returns", *(name for name in _SOMETIMES_WRITTEN if name in written)]
    return tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(
            {name: numbers.clone() for name in names} | {"response_mask": masks, "loss_mask": masks.clone()},
            batch_size=len(rows),
        ),
    )
