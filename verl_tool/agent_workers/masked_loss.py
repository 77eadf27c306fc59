"""Normalise the loss by the rollouts that are in it. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import TrainingWorker

from verl_tool.agent_workers.rollout_weights import PATCHES, ROLLOUT_SHARE, weighting
from verl_tool.errors import VerlToolError

for _patch in PATCHES:
    _patch.install()

NUM_MINI_BATCHES = "num_mini_batch"
"""Key of a batch's extra information in verl: the number of mini-batches of equal size in a rank's rows."""
LossFn = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
"""Type of verl's loss functions: ``(model_output, data, dp_group) -> (loss, metrics)`` of one micro-batch."""


class MaskedLossWorker(TrainingWorker):
    """verl's worker of the actor or the critic, with losses that are means over the rollouts with a token in the loss.

    verl divides by the nominal size of a mini-batch, so that an update would shrink with each excluded row. If all rows
    of a mini-batch are excluded, the optimizer step is skipped; it would follow the momentum of earlier steps.
    """

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """Update with each mini-batch. `data` is this rank's part of all mini-batches.

        With `num_mini_batch` (in place of `mini_batch_size`), the trainer has laid them out one after the other with
        equal size. Raises VerlToolError for rows of cut rollouts without it, since rollouts would be split.
        """
        laid_out = tu.get(data, key=NUM_MINI_BATCHES, default=None) is not None
        if ROLLOUT_SHARE in data and not laid_out:
            raise VerlToolError(
                "the worker got rows of rollouts without num_mini_batch, which keeps whole rollouts in one mini-batch; "
                "verl has dropped the batch's extra information on the way: install the pinned version"
            )
        if laid_out:
            tu.pop(data, key="mini_batch_size", default=None)
            tu.assign_non_tensor(data, dataloader_kwargs={"shuffle": False})
        return super().train_mini_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Set the loss of each micro-batch, wrapped so that it is not NaN without tokens."""
        super().set_loss_fn(EmptyBatchSafeLoss(loss_fn))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """Update with one mini-batch. `data` is this rank's part of it."""
        # verl counts the tokens of the loss by `loss_mask`, which misses later changes of `response_mask`.
        data["loss_mask"] = data["response_mask"]
        rollouts = count_valid_rollouts(data, self.engine.get_data_parallel_group())
        tu.assign_non_tensor(data, global_batch_size=max(rollouts, 1))
        if rollouts:
            return super().train_batch(data)
        with _without_update(self.engine):
            return super().train_batch(data)


class EmptyBatchSafeLoss:
    """Wraps a loss so that a mini-batch without tokens gives 0 and not 0/0, which is NaN."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def __call__(
        self, model_output: Any, data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if data["batch_num_tokens"] == 0:
            tu.assign_non_tensor(data, batch_num_tokens=1)
        with weighting(data):
            return self._loss_fn(model_output=model_output, data=data, dp_group=dp_group)


def count_valid_rollouts(data: TensorDict, dp_group: Any) -> int:
    """Count the rollouts with a token in the loss over all data-parallel ranks. Without `ROLLOUT_SHARE`, each row is
    one rollout. The mask ``data["loss_mask"]`` is padded or nested ``[rows, length]``.
    """
    mask = data["loss_mask"]
    padded = mask.to_padded_tensor(0) if mask.is_nested else mask
    valid = padded.bool().any(dim=-1)
    shares = valid.double() if ROLLOUT_SHARE not in data else valid * data[ROLLOUT_SHARE].double()
    rollouts = shares.sum().to(get_device_id())
    torch.distributed.all_reduce(rollouts, op=torch.distributed.ReduceOp.SUM, group=dp_group)
    return round(rollouts.item())


@contextmanager
def _without_update(engine: Any) -> Iterator[None]:
    engine.optimizer_step = lambda: 0.0
    try:
        yield
    finally:
        del engine.optimizer_step
