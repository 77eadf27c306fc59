"""The tokens that stand for a part of an image, which no policy may write. Written for verl 0.9.0 and 0.9.1.

verl takes them out of what vLLM samples from, and leaves them in where it trains: the two disagree on the probability
of every token. Here they are taken out of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_tool.platforms.patch import verl_patch

BANNED = -1e4
"""The logit of such a token: no probability is left, and the entropy stays a number, which minus infinity makes NaN."""


def ban_placeholders(model: Any) -> None:
    """Have a model of transformers give the tokens for images and videos no probability."""
    named = (getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video"))
    ids = [token_id for token_id in named if token_id is not None]
    head = model.get_output_embeddings()
    if head is None or not ids or getattr(model.config, "vision_config", None) is None:
        return

    def ban(_head: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., ids] = BANNED
        return logits

    head.register_forward_hook(ban)


def _with_ban(original: Callable[..., None]) -> Callable[..., None]:
    def apply_monkey_patch(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        ban_placeholders(model)

    return apply_monkey_patch


PLACEHOLDER_BAN = verl_patch(
    "models.transformers.monkey_patch",
    "apply_monkey_patch",
    why="tokens for images are banned in vLLM only, so that rollout and training disagree",
    replace=_with_ban,
)
