"""Describe what ended a training."""

from __future__ import annotations

import tempfile
from pathlib import Path

from omegaconf import DictConfig
from ray.exceptions import RayTaskError

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.trainer.run_folder.checkpoints import latest_step


def disk_full_message(config: DictConfig, error: Exception) -> str:
    """Describe the failure, the free disk space, how to resume, and the exception."""
    from verl_tool.trainer.preflight.memory import GB
    from verl_tool.trainer.preflight.resources import free_bytes

    checkpoints = Path(config.trainer.default_local_dir).resolve()
    try:
        step = latest_step(checkpoints)
        resume = "it goes on from the start" if step is None else f"it goes on from {checkpoints}/global_step_{step}"
    except (ConfigError, OSError) as why:
        resume = str(why)
    folders = dict.fromkeys((Path(config.run_dir).resolve(), checkpoints, Path(tempfile.gettempdir())))
    cause, _, _ = cause_of(error).partition("\n")
    left = ", ".join(f"{free_bytes(folder) / GB:.1f} GB left at {folder}" for folder in folders)
    return (
        f"error: the training ended: a disk is full ({left}); make room and run the same command again: "
        f"{resume} ({cause})"
    )


def innermost(error: RayTaskError) -> RayTaskError:
    """Return the error of the process where it started. Ray wraps it once per process that it passes through."""
    while isinstance(error.cause, RayTaskError):
        error = error.cause
    return error


def cause_of(error: Exception) -> str:
    """Describe the original error in a line or two."""
    cause = innermost(error).cause if isinstance(error, RayTaskError) else error
    return str(cause) if isinstance(cause, VerlToolError) else f"{type(cause).__name__}: {cause}"
