"""vLLM's Qwen2-VL and Qwen2.5-VL where verl gives them their weights. Written for vLLM 0.28.0.

verl starts vLLM with random weights (``load_format=dummy``) and hands over the real ones. vLLM keeps the constants by
which these models normalise pixels among what is made random, and no checkpoint holds them: images become noise.
"""

from __future__ import annotations

from typing import Any

from packaging.specifiers import SpecifierSet

from verl_tool.platforms.patch import Patch


def constant(norm: type[Any]) -> type[Any]:
    """The class that normalises pixels, whose constants are no part of its state."""

    class ConstantNorm(norm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._non_persistent_buffers_set.update(self._buffers)

    return ConstantNorm


def input_norm(distribution: str) -> Patch:
    """`distribution`: the name under which vLLM is installed."""
    return Patch(
        distribution=distribution,
        versions=SpecifierSet(">=0.28.0,<0.29"),
        module="vllm.model_executor.models.vision",
        attribute="FusedInputNorm",
        why="random weights overwrite the constants that normalise pixels",
        replace=constant,
    )
