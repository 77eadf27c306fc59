"""The newest weights of a training run, in the form that engines read."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_tool.errors import ConfigError

MERGE_SECONDS = 3600.0
MERGED = "merged"
"""Folder, beside a checkpoint's shards, of the weights put together from them."""
MEGATRON_EXPORT = Path("model", "huggingface")
"""Where Megatron's bridge writes the weights of a checkpoint."""
MEGATRON_SHARDS = Path("model", "dist_ckpt")
_STEP = re.compile(r"global_step_(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a training after one of its steps."""

    run: str
    """Name of the run's folder."""
    step: int
    model: Path
    """Folder with the weights in Hugging Face's form."""
    without_weights: tuple[int, ...] = ()
    """Later steps whose folders hold no weights: saving them was broken off."""

    def __str__(self) -> str:
        later = ", ".join(f"global_step_{step}" for step in self.without_weights)
        return f"step {self.step} of {self.run}" + (f" (no weights in {later})" if later else "")


def newest_checkpoint(run: Path) -> Checkpoint:
    """The last checkpoint of a run that has weights. One that holds only shards is merged with verl's own merger, once.

    Raises ConfigError if there is none; the model with which a training began is none.
    """
    without: list[int] = []
    for step, actor in _actors(run):
        for folder in (actor / "huggingface", actor / MEGATRON_EXPORT, actor / MERGED):
            if _has_weights(folder):
                return Checkpoint(run.resolve().name, step, folder, tuple(without))
        if list(actor.glob("model_world_size_*_rank_*.pt")):
            return Checkpoint(run.resolve().name, step, _merge(actor), tuple(without))
        if (actor / MEGATRON_SHARDS).is_dir():
            raise ConfigError(
                f"{actor} holds Megatron's shards and no weights in Hugging Face's form; train with "
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model], which writes "
                f"{actor / MEGATRON_EXPORT}; or convert them (verl.model_merger --backend megatron) and give --model"
            )
        without.append(step)
    began = run / "model"
    untrained = f"; --model {began} is the model with which the training began" if _has_weights(began) else ""
    raise ConfigError(
        f"no checkpoint in {run} (looked for checkpoints/global_step_*/actor): the training saved none, or has not "
        f"come to its first; the last step is saved by default (save_last=true){untrained}; else give --model"
    )


def newest_model(run: Path) -> Path:
    """The folder of `newest_checkpoint`."""
    return newest_checkpoint(run).model


def last_saved_step(run: Path) -> int | None:
    """The step of the last checkpoint with weights in Hugging Face's form; nothing is merged."""
    for step, actor in _actors(run):
        if any(_has_weights(actor / folder) for folder in ("huggingface", MEGATRON_EXPORT, MERGED)):
            return step
    return None


def how_to_serve(run: Path, data: Path | None = None) -> str:
    """The commands that serve and evaluate a run, one a line; where there is no checkpoint, why there are none."""
    try:
        checkpoint = newest_checkpoint(run)
    except ConfigError as error:
        return f"not served:   {error}"
    lines = [f"serve it:     bash eval_service/scripts/start_api_service.sh --from_run {run}    ({checkpoint})"]
    if data is not None:
        lines.append(f"evaluate it:  python -m eval_service.evaluate --data {data} --from_run {run}")
    return "\n".join(lines)


def _actors(run: Path) -> list[tuple[int, Path]]:
    """Steps and actors of all checkpoints, newest first."""
    steps = [
        (int(found.group(1)), folder)
        for folder in [*run.glob("global_step_*"), *run.glob("checkpoints/global_step_*")]
        if (found := _STEP.search(folder.name))
    ]
    return [(step, folder / "actor") for step, folder in sorted(steps, reverse=True)]


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(
        next(folder.glob(pattern), None) is not None for pattern in ("*.safetensors", "pytorch_model*.bin")
    )


def _merge(actor: Path) -> Path:
    target = actor / MERGED
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(actor), "--target_dir", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=MERGE_SECONDS)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout)[-1000:]
        raise ConfigError(f"the checkpoint in {actor} could not be merged: {words}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the checkpoint in {actor} was not merged in {MERGE_SECONDS:g} s") from error
    if not _has_weights(target):
        raise ConfigError(f"verl's merger left no weights in {target}; merge {actor} by hand and give --model")
    return target
