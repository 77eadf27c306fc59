"""Weight rows in a loss that is a mean over rollouts. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from tensordict import TensorDict

from verl_tool.platforms.patch import Patch, verl_patch

ROLLOUT_SHARE = "rollout_share"
"""Column of a batch: 1 / (number of rows of the rollout with a token in the loss). Its sum counts rollouts. [rows]"""
TOKEN_SHARE = "token_share"
"""Column of a batch: this row's share of its rollout's tokens in the loss. [rows]"""

_token_share: ContextVar[torch.Tensor | None] = ContextVar("token_share", default=None)


def rollout_weights(rollout_by_row: Sequence[int], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute `ROLLOUT_SHARE` and `TOKEN_SHARE` of each row; 0 for a row without a token in the loss.

    `rollout_by_row` is the number of each row's rollout, `tokens` each row's number of tokens in the loss. [rows]
    """
    rollouts = torch.as_tensor(rollout_by_row)
    size = int(rollouts.max()) + 1 if len(rollouts) else 0
    valid = (tokens > 0).double()
    rows = torch.zeros(size, dtype=torch.float64).index_add_(0, rollouts, valid)
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, rollouts, tokens.double())
    return {
        ROLLOUT_SHARE: (valid / rows.clamp(min=1)[rollouts]).float(),
        TOKEN_SHARE: (tokens / total.clamp(min=1)[rollouts]).float(),
    }


@contextmanager
def weighting(data: TensorDict) -> Iterator[None]:
    """Within this block, make means over rows of the micro-batch `data` means over rollouts, if it has
    `TOKEN_SHARE`."""
    token = _token_share.set(data.get(TOKEN_SHARE, None))
    try:
        yield
    finally:
        _token_share.reset(token)


def weight_rows(agg_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap verl's `agg_loss`: a rollout's mean over tokens is the sum of its rows' means, weighted by their tokens.

    The other modes add up tokens, so that cutting a rollout does not change them. A wrapped function is returned as is,
    since a module may have imported the replacement already.
    """
    if hasattr(agg_loss, "__wrapped__"):
        return agg_loss

    @wraps(agg_loss)
    def wrapped(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str, *args: Any, **kwargs: Any) -> Any:
        share = _token_share.get()
        if share is not None and loss_agg_mode == "seq-mean-token-mean":
            loss_mat = loss_mat * share.to(loss_mat)[:, None]
        return agg_loss(loss_mat, loss_mask, loss_agg_mode, *args, **kwargs)

    return wrapped


def _patch(module: str) -> Patch:
    why = "each loss calls it by this global name, and has no argument for weights of rows"
    return verl_patch(module, "agg_loss", why, weight_rows)


PATCHES = (_patch("trainer.ppo.core_algos"), _patch("workers.utils.losses"))
