"""Training without an accelerator: a platform for verl, by the entry point ``verl.plugins``.

verl loads this module at the end of ``import verl``, in each of its processes. Where torch was built for an
accelerator, or ``VERL_PLATFORM`` names another platform, there is no platform of ours: only the sockets of the
process groups and of the weight sync are put where nobody else reaches them, and flash attention may be missing.
Written for verl 0.9.0 and 0.9.1; `require` tells whether it is in force, since verl only logs a plugin that fails to
load.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform

from verl_tool.errors import ConfigError
from verl_tool.platforms import vllm_distribution
from verl_tool.platforms.process_group_store import STORE
from verl_tool.platforms.verl_patches import PATCHES, WITHOUT_ACCELERATOR
from verl_tool.platforms.vision import patches as vision
from verl_tool.platforms.weight_sync import ENDS

_CPU = torch.device("cpu")
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE")


def trains_on_cpu() -> bool:
    """Whether this process shall train on the CPU: ``VERL_PLATFORM`` says so, or torch knows no accelerator.

    A torch that was built for GPUs is left alone even on a node that has none, such as a cluster's head.
    """
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    return platform == "cpu" if platform else torch.accelerator.current_accelerator() is None


class _Event:
    """A moment on the CPU's only stream: it has always passed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _Stream(contextlib.AbstractContextManager):
    """The CPU's only stream: work on it is done when the call returns."""

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Device:
    """The one device of a process: its CPU, where work is done when the call returns."""

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl says `tensor.to(get_device_id())`: the number 0 would mean the first accelerator.
        return _CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, *_: Any) -> None: ...

    def synchronize(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, *_: Any) -> tuple[None, None]:
        return None, None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


class _HostMemory(_Device, ModuleType):
    """The names of ``torch.cuda`` that verl uses, told about this process and the host's memory (bytes)."""

    Stream = _Stream
    Event = _Event
    is_initialized = _Device.is_available

    def ipc_collect(self) -> None: ...

    def reset_peak_memory_stats(self, *_: Any) -> None: ...

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def memory_allocated(self, *_: Any) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = memory_allocated

    def max_memory_allocated(self, *_: Any) -> int:
        # The kernel notes the peak a little late.
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.memory_allocated())

    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def get_device_properties(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(name="CPU", total_memory=psutil.virtual_memory().total)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


_HOST_MEMORY = _HostMemory("verl_tool.platforms.cpu.host_memory")


class PlatformCPU(_Device, PlatformBase):
    """verl's platform for a machine without an accelerator: one device a process, gloo between processes."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _HOST_MEMORY

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return trains_on_cpu()

    def set_allocator_settings(self, settings: str) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        # A slot for one training process. verl counts resources named GPU or NPU only; Ray is told how many there are
        # (`ray_kwargs.ray_init.num_gpus`).
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        # Makes verl hand weights to vLLM through shared memory.
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {name: os.environ[name] for name in _THREAD_SETTINGS if name in os.environ}

    def cudart(self) -> None:
        return None


def activate() -> None:
    """Register the platform and install what it needs of verl, in this process and those that it starts. Raises
    PatchError, now or when the module in question is imported, if verl has no longer what is replaced."""
    os.environ["VERL_PLATFORM"] = "cpu"
    # verl registers its FSDP engines for CUDA and NPU by name; this is its own way to choose them.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # vLLM asks the text part of a model with images for its attention, which fails on a CPU only.
    os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    vllm_distribution.install()
    for patch in WITHOUT_ACCELERATOR:
        patch.install()
    PlatformRegistry.register(platform="cpu")(PlatformCPU)


def require() -> None:
    """Check that verl trains on the CPU here. Raises ConfigError if it does not, with the reason and the mend."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        raise ConfigError(
            "CUDA_VISIBLE_DEVICES is set and empty, so Ray counts no device at all; run: unset CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cpu, but torch sees a GPU and vLLM would use it; leave trainer.device out, or hide the GPU "
            "by installing the cpu extra (pip install 'verl-tool[cpu]') into an environment of its own"
        )
    found = get_platform().device_name
    if found != "cpu":
        raise ConfigError(f"trainer.device=cpu, but verl chose the platform {found!r}: {_why_not()}")


def _why_not() -> str:
    platform = os.environ.get("VERL_PLATFORM", "")
    if platform not in ("", "cpu"):
        return f"VERL_PLATFORM is {platform!r}; unset it"
    if os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto") != "auto":
        return "VERL_USE_EXTERNAL_PLUGINS keeps out the plugin 'verl_tool_cpu'; unset it"
    if "verl_tool_cpu" not in {entry.name for entry in entry_points(group="verl.plugins")}:
        return "verl-tool's entry point 'verl_tool_cpu' is not installed; install the package again (pip install -e .)"
    if not trains_on_cpu():
        return "torch is built for an accelerator; set VERL_PLATFORM=cpu to train on the CPU all the same"
    return "the plugin 'verl_tool_cpu' failed to load; `python -c 'import verl_tool.platforms.cpu'` shows why"


# verl loads a plugin by importing it and calls nothing.
EVERYWHERE = (STORE, *ENDS, *PATCHES, *vision.PATCHES)
for _patch in EVERYWHERE:
    _patch.install()
if trains_on_cpu():
    activate()
