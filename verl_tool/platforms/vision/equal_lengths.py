"""Batches of a model with images whose sequences are all equally long. Written for verl 0.9.0 and 0.9.1.

Such a model has four rows of positions for each sequence, [4, length]. verl leaves it to torch to find the dimension in
which sequences differ. Where none does, torch takes the first: the four rows are then taken for the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_tool.platforms.patch import verl_patch

_LENGTH = 2
"""The dimension of the length in a batch of positions, [batch, 4, length]."""


def ragged(rows: list[torch.Tensor]) -> torch.Tensor:
    """Positions of sequences, each [4, length], as one nested tensor."""
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    return nested_tensor_from_tensor_list(rows, ragged_idx=_LENGTH)


def _of_padded(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def left_right_2_no_padding(data: Any) -> Any:
        positions, masks = data["position_ids"], data["attention_mask"]
        data = original(data)
        if positions.dim() == 3:
            data["position_ids"] = ragged([rows[:, mask.bool()] for rows, mask in zip(positions, masks, strict=True)])
        return data

    return left_right_2_no_padding


def _of_nested(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def maybe_fix_3d_position_ids(data: Any) -> None:
        positions = data["position_ids"] if "position_ids" in data.keys() else None  # noqa: SIM118 - no mapping
        if positions is not None and positions.is_nested and positions.dim() == 3:
            values, ends = positions.values(), positions.offsets()
            if values.dim() == 2 and values.shape[1] != ends[-1] == values.shape[0]:
                data["position_ids"] = ragged(list(values.chunk(len(ends) - 1)))
        original(data)

    return maybe_fix_3d_position_ids


EQUAL_LENGTHS = (
    verl_patch(
        "workers.utils.padding",
        "left_right_2_no_padding",
        why="positions of sequences that are all equally long are taken apart in the wrong dimension",
        replace=_of_padded,
    ),
    verl_patch(
        "utils.tensordict_utils",
        "maybe_fix_3d_position_ids",
        why="positions of sequences that are all equally long are told to be what they are not",
        replace=_of_nested,
    ),
)
