"""Compare the model on the tokens of its calls with its other text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

Loss = tuple[torch.Tensor, dict[str, Any]]
LossFn = Callable[..., Loss]
"""Type of verl's loss functions: ``(model_output, data, dp_group) -> (loss, metrics)`` of one micro-batch."""


class LossWithSegmentStatistics:
    """Wraps a loss and adds metrics: entropy and log-prob gap, separately for calls and for other text.

    The gap is the mean absolute difference between the log-probabilities of the trained model and of the engine that
    sampled the tokens. Before the first update of a step, it measures how far engine and trainer disagree.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def __call__(
        self, model_output: Any, data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        statistics = segment_statistics(model_output, data)
        loss, metrics = self._loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        if not data["batch_num_tokens"]:
            # No token of this mini-batch is in the loss; 0/0 would be NaN.
            loss = torch.nan_to_num(loss, nan=0.0)
        return loss, metrics | statistics


@torch.no_grad()
def segment_statistics(model_output: Any, data: TensorDict) -> dict[str, Metric]:
    """Compute mean entropy (nats) and log-prob gap per token, for ``action`` and ``text`` tokens of a micro-batch."""
    if "action_mask" not in data:
        return {}
    fields = [name for name in ("response_mask", "action_mask", "rollout_log_probs") if name in data]
    padded = data.select(*fields).to_padded_tensor()
    written = padded["response_mask"].bool()
    # verl pads batches with rows of one token, which keep the action mask of the row that they were copied from.
    calls = padded["action_mask"].bool()[:, : written.shape[1]] & written
    values = {}
    if model_output.get("entropy") is not None:
        values["entropy"] = no_padding_2_padding(model_output["entropy"], data)
    if "rollout_log_probs" in data:
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        values["log_prob_gap"] = (log_probs - padded["rollout_log_probs"]).abs()
    return {
        f"segment/{segment}_{name}": Metric(value=value[mask].mean(), aggregation=AggregationType.MEAN)
        for segment, mask in (("action", calls), ("text", written & ~calls))
        if mask.any()
        for name, value in values.items()
    }
