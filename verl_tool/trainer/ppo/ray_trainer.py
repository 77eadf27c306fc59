"""Extend verl's trainer that keeps the batch in the driver (``trainer.use_v1=False``) with tools.

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl import DataProto
from verl_tool.agent_loop.row import VALIDATION
from verl_tool.agent_loop.trajectory import BONUS, POLICY_INDUCED, REWARD_FAULT, as_trajectory
from verl_tool.platforms.patch import Patch, verl_patch
from verl_tool.trainer.monitoring.engine_watch import EngineWatch
from verl_tool.trainer.ppo.advantage import without_invalid
from verl_tool.trainer.ppo.curiosity import add_bonuses, curiosity_bonuses
from verl_tool.trainer.ppo.invalid import invalid_rows
from verl_tool.trainer.ppo.rollout_log import TOKENS_TIMER, Rewards, bypasses, rollout_log
from verl_tool.trainer.ppo.rollout_results import rollout_results
from verl_tool.trainer.ppo.step_report import tracking_patch
from verl_tool.trainer.ppo.turns.turn_columns import TURN_IDS, takes_turns
from verl_tool.trainer.ppo.turns.turn_metrics import variance_share
from verl_tool.trainer.ppo.valid_rows import penalise_rows_in_loss, summarise_valid_rows
from verl_tool.trainer.ppo.validation import main_results_by_source, summarise_valid
from verl_tool.trainer.progress.progress import Progress
from verl_tool.trainer.progress.progress_board import Phase
from verl_tool.trainer.run_folder.checkpoints import atomic_checkpoint

REPORTED = (REWARD_FAULT, POLICY_INDUCED)
"""Columns of the reward manager that say whether grading failed."""


def _patch(attribute: str, replace: Callable[[Any], Any]) -> Patch:
    why = "the training loop calls this function by its global name; there is no method to override"
    return verl_patch("trainer.ppo.ray_trainer", attribute, why, replace)


ADVANTAGE = _patch("compute_advantage", without_invalid)
KL_PENALTY = _patch("apply_kl_penalty", penalise_rows_in_loss)
METRICS = _patch("compute_data_metrics", summarise_valid_rows)
PATCHES = (ADVANTAGE, KL_PENALTY, METRICS)


RECORD_LINE = "record_line"
"""Column of a batch: the line of a trajectory's record, -1 for a greedy baseline."""
TRACKING = tracking_patch("utils.tracking")


class AgentRayPPOTrainer(RayPPOTrainer):
    """verl's trainer, which also stores trajectories, reports tool metrics, and leaves faults out of every baseline."""

    async_rollout_manager: Any

    def init_workers(self) -> None:
        """Build the workers as verl does, and watch the rollouts."""
        for patch in PATCHES:
            patch.install()
        TRACKING.install()
        self._rollouts = rollout_log(self.config)
        self._progress = Progress(self.config.stall_timeout)
        super().init_workers()
        self.async_rollout_manager = _WatchedRollouts(
            self.async_rollout_manager, self._on_rollout_begin, self._on_rollout
        )
        EngineWatch(self.llm_server_manager.get_addresses()).start()
        # The workers, and so the learning-rate schedule, use the number of steps from the config.
        step = self.config.actor_rollout_ref.replay_step
        if step is not None:
            self.total_training_steps = int(step)

    def _on_rollout_begin(self, prompts: DataProto) -> None:
        if not _validates(prompts):
            self._progress.begin(Phase.ROLLOUT, self.global_steps, self.total_training_steps, len(prompts))

    def _on_rollout(self, prompts: DataProto, output: DataProto) -> None:
        """Remove the loop's columns from a rollout's output before it is sent to the workers, and record it."""
        records = np.empty(len(output), dtype=object)
        records[:] = [as_trajectory(each) for each in output.non_tensor_batch.pop("trajectory")]
        invalid = np.array(invalid_rows(output.non_tensor_batch, len(output)))
        output.batch["response_mask"][invalid] = 0
        masks = output.non_tensor_batch.pop("action_mask")
        output.batch["action_mask"] = _pad(masks, output.batch["response_mask"])
        turns = output.non_tensor_batch.pop(TURN_IDS)
        if takes_turns(self.config.algorithm.adv_estimator):
            output.batch[TURN_IDS] = _pad(turns, output.batch["response_mask"])
        step, validation = int(prompts.meta_info["global_steps"]), _validates(prompts)
        sampled = np.array(prompts.non_tensor_batch.get("__do_sample__", np.ones(len(output))), dtype=bool)
        groups = prompts.non_tensor_batch.get("uid")
        bonuses: list[float] = []
        if not validation and groups is not None:
            bonuses = curiosity_bonuses(output.non_tensor_batch, groups, invalid | ~sampled)
        if any(bonuses):
            add_bonuses(output, bonuses)
        rewards = output.batch["rm_scores"].sum(-1).numpy() if "rm_scores" in output.batch else None
        if not sampled.all():
            self._rollouts.add_baselines(records[~sampled], None if rewards is None else rewards[~sampled], step)
            if rewards is not None:
                # Rows without a baseline are left out.
                output.batch["rm_scores"][torch.from_numpy(invalid & ~sampled)] = torch.nan
        names = dict.fromkeys((*REPORTED, *output.meta_info.get("reward_extra_keys", ())))
        columns = {name: output.non_tensor_batch[name][sampled] for name in names if name in output.non_tensor_batch}
        if bonuses:
            columns[BONUS] = np.array(bonuses)[sampled]
        grading = Rewards(
            columns=columns,
            groups=None if groups is None else groups[sampled],
            without_baseline=() if groups is None else set(groups[invalid & ~sampled]),
        )
        rewards = None if rewards is None else rewards[sampled].tolist()
        written = self._rollouts.add(records[sampled].tolist(), rewards, step, validation=validation, grading=grading)
        if not validation:
            numbers = np.full(len(output), -1, dtype=object)
            numbers[sampled] = list(written)
            output.non_tensor_batch[RECORD_LINE] = numbers
            right = output.non_tensor_batch.get("acc")
            right = None if right is None else right[sampled]
            self._progress.tell(rollout_results(self._rollouts.metrics, rewards, right, invalid[sampled].tolist()))
            self._progress.begin(Phase.UPDATE, self.global_steps, self.total_training_steps)

    def _update_critic(self, batch: DataProto) -> DataProto:
        return self._with_tool_metrics(super()._update_critic(batch))

    def _update_actor(self, batch: DataProto) -> DataProto:
        metrics = self._store_tokens(batch)
        if takes_turns(self.config.algorithm.adv_estimator):
            metrics |= variance_share(batch.batch["advantages"], batch.batch["response_mask"])
        output = self._with_tool_metrics(super()._update_actor(batch))
        output.meta_info["metrics"].update(metrics)
        return output

    def _store_tokens(self, batch: DataProto) -> dict[str, float]:
        """Write the step's token records, if they are due. Returns the time that it took, as a metric."""
        if not self._rollouts.tokens.is_due(self.global_steps) or RECORD_LINE not in batch.non_tensor_batch:
            return {}
        began = time.perf_counter()
        fields = {"advantages": "advantages", "mask": "response_mask"}
        if not bypasses(self.config):
            fields["log_probs"] = "old_log_probs"
        lines = batch.non_tensor_batch[RECORD_LINE]
        lengths = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(-1).tolist()
        stored = [row for row, line in enumerate(lines) if line >= 0]
        columns = {name: batch.batch[field].cpu().float().numpy() for name, field in fields.items()}
        tokens = {name: [column[row, : lengths[row]] for row in stored] for name, column in columns.items()}
        self._rollouts.tokens.add(self.global_steps, [lines[row] for row in stored], tokens)
        return {TOKENS_TIMER: time.perf_counter() - began}

    def _with_tool_metrics(self, output: DataProto) -> DataProto:
        self._progress.alive()
        output.meta_info["metrics"].update(self._rollouts.take_metrics() | self._progress.take_metrics())
        return output

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps >= self.total_training_steps:
            # verl checks after each step whether it was the last, so that a finished run would make another step.
            self.config.trainer.total_epochs = 0

    def _save_checkpoint(self) -> None:
        with atomic_checkpoint(Path(self.config.trainer.default_local_dir), self.global_steps):
            super()._save_checkpoint()

    def _validate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        expected = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        self._progress.begin(Phase.VALIDATION, self.global_steps, self.total_training_steps, expected)
        metrics = super()._validate(*args, **kwargs)
        self._progress.tell(main_results_by_source(metrics))
        self._progress.end()
        return metrics | self._progress.take_metrics()

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return summarise_valid(super()._val_metrics_update, *args, **kwargs) | self._rollouts.take_validation_metrics()


class _WatchedRollouts:
    """verl's rollout manager with callbacks before and after each rollout."""

    def __init__(
        self, manager: Any, on_begin: Callable[[DataProto], None], on_end: Callable[[DataProto, DataProto], None]
    ) -> None:
        self._manager, self._on_begin, self._on_end = manager, on_begin, on_end

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample the rollouts of `prompts`. verl calls no other method."""
        self._on_begin(prompts)
        if _validates(prompts):
            prompts.non_tensor_batch[VALIDATION] = np.full(len(prompts), True)
        output = self._manager.generate_sequences(prompts)
        self._on_end(prompts, output)
        return output


def _validates(prompts: DataProto) -> bool:
    return bool(prompts.meta_info.get("validate", False))


def _pad(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Convert lists of integers to a tensor, with zeros on the right. [batch, response_length]"""
    padded = torch.zeros_like(like)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=like.dtype)
    return padded
