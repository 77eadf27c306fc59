"""Run verl's functions on whole rollouts by concatenating the response columns of each rollout's rows.

A function of verl that works on sequences, such as an advantage estimator, sees one sequence per rollout and none of
the cuts. The columns that it writes are split into rows again. Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl import DataProto
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex

_OF_PROMPTS = ("prompts", "input_ids", "attention_mask", "position_ids")
"""Columns that do not belong to the response, although they may have the same width."""


class JoinedRows:
    """The layout of rollouts whose rows are joined."""

    def __init__(self, index: RolloutIndex, lengths: Sequence[int]) -> None:
        """`lengths` are the numbers of response tokens of the rows."""
        self.index, self.lengths = index, list(lengths)
        self._width = max((sum(self.lengths[row] for row in rows) for rows in index.rollouts), default=0)

    def join(self, column: torch.Tensor) -> torch.Tensor:
        """Join a response column by rollout, padded with 0. [rows, width] -> [rollouts, joined width]"""
        joined = column.new_zeros(len(self.index), self._width)
        for rollout, places in self._places():
            for row, start in places:
                length = self.lengths[row]
                joined[rollout, start : start + length] = column[row, :length]
        return joined

    def split(self, joined: torch.Tensor, width: int) -> torch.Tensor:
        """Invert `join`. [rollouts, joined width] -> [rows, width]"""
        column = joined.new_zeros(len(self.lengths), width)
        for rollout, places in self._places():
            for row, start in places:
                length = self.lengths[row]
                column[row, :length] = joined[rollout, start : start + length]
        return column

    def join_batch(self, data: DataProto) -> DataProto:
        """Make a batch of rollouts: join response columns and their lengths, take the rest from final rows."""
        final = self.index.final
        width = _width(data)
        batch = {
            name: self.join(column) if _is_response(name, column, width) else column[final]
            for name, column in data.batch.items()
        }
        if "response_length" in batch:
            lengths = data.batch["response_length"]
            batch["response_length"] = torch.stack([lengths[list(rows)].sum() for rows in self.index.rollouts])
        others = {name: column[final] for name, column in data.non_tensor_batch.items()}
        tensors = TensorDict(batch, batch_size=len(self.index))
        return DataProto(batch=tensors, non_tensor_batch=others, meta_info=dict(data.meta_info))

    def split_batch(self, joined: DataProto, data: DataProto) -> DataProto:
        """Write the response columns of `joined` into the rows of `data`."""
        width = _width(data)
        for name, column in joined.batch.items():
            if _is_response(name, column, self._width):
                data.batch[name] = self.split(column, width)
        return data

    def _places(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield each rollout with its rows, and the position of each row in the joined sequence."""
        for rollout, rows in enumerate(self.index.rollouts):
            starts = np.cumsum([0, *(self.lengths[row] for row in rows[:-1])]).tolist()
            yield rollout, list(zip(rows, starts, strict=True))


_joined: ContextVar[JoinedRows | None] = ContextVar("joined_rows", default=None)


@contextmanager
def joining(index: RolloutIndex, lengths: Sequence[int]) -> Iterator[None]:
    """Let functions wrapped by `on_rollouts` see whole rollouts within the block. For `lengths` see `JoinedRows`."""
    token = _joined.set(JoinedRows(index, lengths))
    try:
        yield
    finally:
        _joined.reset(token)


@contextmanager
def _plain() -> Iterator[None]:
    token = _joined.set(None)
    try:
        yield
    finally:
        _joined.reset(token)


def on_rollouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of verl that takes a batch and returns metrics, or the batch with or without metrics."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        joined = _joined.get()
        if joined is None:
            return function(*args, **kwargs)
        name = next((name for name in ("data", "batch") if name in kwargs), None)
        rows: DataProto = args[0] if name is None else kwargs[name]
        whole = joined.join_batch(rows)
        if "batch_keys" in kwargs:
            kwargs["batch_keys"] = [kwargs["batch_keys"][row] for row in joined.index.final]
        args, kwargs = (args, kwargs | {name: whole}) if name is not None else ((whole, *args[1:]), kwargs)
        with _plain():  # functions that it calls get whole rollouts already
            result = function(*args, **kwargs)
        if isinstance(result, DataProto):
            return joined.split_batch(result, rows)
        if isinstance(result, tuple) and isinstance(result[0], DataProto):
            return joined.split_batch(result[0], rows), *result[1:]
        return result

    return wrapped


def aggregate_on_rollouts(agg_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap verl's `agg_loss` where the trainer computes a metric with it."""

    @wraps(agg_loss)
    def wrapped(loss_mat: torch.Tensor, loss_mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        joined = _joined.get()
        if joined is not None:
            loss_mat, loss_mask = joined.join(loss_mat), joined.join(loss_mask)
        with _plain():
            return agg_loss(loss_mat, loss_mask, *args, **kwargs)

    return wrapped


def _width(data: DataProto) -> int:
    return int(data.batch["response_mask"].shape[1])


def _is_response(name: str, column: torch.Tensor, width: int) -> bool:
    return column.dim() == 2 and column.shape[1] == width and name not in _OF_PROMPTS
