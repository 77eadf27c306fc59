"""The parts of the smoke test: what each checks, what it needs, and how long it may take. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
Figures = dict[str, Any]
"""What a part measured, by name with its unit; JSON values."""
LOOP = ("torch", "transformers", "msgspec", "pydantic")
SERVER = ("aiohttp", "uvicorn", "uvloop", "starlette", "httptools", "prometheus_client", "docstring_parser")
ENGINE = (*LOOP, "vllm", "uvicorn")
TRAINING = (*ENGINE, *SERVER, "ray", "verl", "tensordict", "transfer_queue", "pandas", "hydra")


class UsageError(ValueError):
    """A part or a device that there is not."""


class PartSkipped(Exception):
    """This machine lacks what the part checks. The message is the reason."""


class PartFailed(Exception):
    """The part ran, and what it found is wrong. The message is the reason."""


@dataclass(frozen=True)
class PartContext:
    device: str
    """``cuda`` or ``cpu``."""
    folder: Path
    """For files of all parts: models, data, runs."""


@dataclass(frozen=True)
class Part:
    """One check, which runs in a process of its own."""

    name: str
    title: str
    function: str
    """``module:function``; takes a `PartContext` and returns `Figures`. Raises `PartSkipped` or
    `PartFailed`; any other exception is a failure too."""
    packages: tuple[str, ...]
    """Modules without which the part is skipped."""
    after: tuple[str, ...] = ()
    """Parts whose files it reads: selected with it, and it is skipped unless they passed."""
    seconds: float = 120.0
    """Deadline on a GPU. `CPU_FACTOR` times as long on a CPU."""


@dataclass
class PartResult:
    name: str
    status: Status
    reason: str = ""
    """Why it failed or was skipped; empty if it passed."""
    seconds: float = 0.0
    peak_device_bytes: int | None = None
    """Largest use of the device's memory while the part ran, less what was in use before it; None without a GPU."""
    peak_host_bytes: int = 0
    """Largest proportional set size of the part's processes."""
    figures: Figures = field(default_factory=dict)


CPU_FACTOR = 6.0
TORCH, ENGINES, TRAININGS = (f"verl_tool.doctor.gpu_smoke.{kind}_parts" for kind in ("torch", "engine", "training"))

PARTS = (
    Part("device", "matrix products and memory of the device", f"{TORCH}:check_device", ("torch",), seconds=60),
    Part("attention", "attention: eager, sdpa and flash-attn", f"{TORCH}:check_attention", ("torch", "transformers")),
    Part("generator", "the loop's transformers generator: log-probabilities", f"{TORCH}:check_generator", LOOP),
    Part("loop", "Episode with functions as tools", f"{TORCH}:check_loop", LOOP),
    Part("update", "a policy-gradient step on the loop's record", f"{TORCH}:check_update", LOOP, after=("loop",)),
    Part("images", "a vision model reads images in the loop", f"{TORCH}:check_images", (*LOOP, "torchvision", "PIL")),
    Part(
        "losses",
        "losses over valid rows, device and CPU",
        f"{TORCH}:check_losses",
        (*LOOP, "verl", "tensordict", "ray"),
    ),
    Part("server", "Episode with a tool server", f"{TORCH}:check_server", (*LOOP, *SERVER)),
    Part("engine", "vLLM: log-probabilities beside transformers", f"{ENGINES}:check_engine", ENGINE, seconds=150),
    Part("tool_calls", "the loop through vLLM with a tool server", f"{ENGINES}:check_tool_calls", (*ENGINE, *SERVER)),
    Part("sleep", "vLLM sleeps and wakes", f"{ENGINES}:check_sleep", ENGINE),
    Part("engine_images", "vLLM reads images", f"{ENGINES}:check_engine_images", (*ENGINE, "torchvision", "PIL")),
    Part("grpo", "two steps of GRPO", f"{TRAININGS}:check_grpo", TRAINING, seconds=240),
    Part("weight_sync", "the engine's weights behind a sync", f"{TRAININGS}:check_weight_sync", TRAINING, ("grpo",)),
    Part("resume", "a run goes on from its checkpoint", f"{TRAININGS}:check_resume", TRAINING, ("grpo",), 240),
    Part("ppo", "two steps of PPO: GAE with a critic", f"{TRAININGS}:check_ppo", TRAINING, seconds=240),
    Part("lora", "two steps with LoRA", f"{TRAININGS}:check_lora", (*TRAINING, "peft"), seconds=240),
    Part("fsdp2", "two steps with FSDP2", f"{TRAININGS}:check_fsdp2", TRAINING, seconds=240),
    Part("determinism", "two runs with one seed", f"{TRAININGS}:check_determinism", TRAINING, seconds=480),
    Part("fp8", "two steps with a rollout in FP8", f"{TRAININGS}:check_fp8", TRAINING, seconds=240),
    Part("ulysses", "two steps with sequences over two GPUs", f"{TRAININGS}:check_ulysses", TRAINING, seconds=240),
)
"""In the order in which they run: what needs least comes first, so that what a deadline leaves out is the rarest."""


def select_parts(names: Collection[str]) -> list[Part]:
    """The named parts and those that they come after, in the order of `PARTS`; all of them for no names. Raises
    UsageError for an unknown name."""
    by_name = {part.name: part for part in PARTS}
    unknown = sorted(set(names) - set(by_name))
    if unknown:
        raise UsageError(f"part {unknown[0]!r} is unknown; known: {', '.join(by_name)}")
    selected = set(names) | {other for name in names for other in by_name[name].after}
    return [part for part in PARTS if not names or part.name in selected]


def missing_packages(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
