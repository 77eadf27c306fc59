"""Sequences without images, for Qwen2-VL and Qwen2.5-VL. Written for verl 0.9.0 and 0.9.1.

For a micro-batch without any image verl runs the vision tower on an empty one, so that all ranks do the same, and takes
its output for a tensor, which it is no longer in transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_tool.platforms.patch import verl_patch


def _with_an_empty_image(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_input_embeds(
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        *grids: torch.Tensor | None,
        **named_grids: torch.Tensor | None,
    ) -> Any:
        if pixel_values is not None or pixel_values_videos is not None:
            media = (pixel_values, pixel_values_videos, *grids)
            return original(model, input_ids, attention_mask, *media, **named_grids)
        from verl.utils.transformers_compat import unpack_visual_output

        embeddings = model.get_input_embeddings()(input_ids)
        vision = model.config.vision_config
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.zeros((16, patch), dtype=embeddings.dtype, device=embeddings.device)
        grid = torch.tensor([[1, 4, 4]], device=embeddings.device)
        seen, _ = unpack_visual_output(model.visual(pixels, grid_thw=grid))
        mask = attention_mask.to(embeddings.device) if attention_mask is not None else None
        return embeddings + 0.0 * seen.mean(), mask

    return _get_input_embeds


BATCH_OF_TEXT = verl_patch(
    "models.transformers.qwen2_vl",
    "_get_input_embeds",
    why="a micro-batch without any image ends the training",
    replace=_with_an_empty_image,
)
