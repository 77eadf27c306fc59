"""The newest weights of a training run, in the form that engines read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from verl_tool.errors import ConfigError

MERGE_SECONDS = 3600.0
MERGED = "merged"
"""Folder, beside a checkpoint's shards, of the weights put together from them."""
MEGATRON_EXPORT = Path("model", "huggingface")
"""Where Megatron's bridge writes the weights of a checkpoint."""
MEGATRON_SHARDS = Path("model", "dist_ckpt")
_STEP = re.compile(r"global_step_(\d+)$")


def newest_model(run: Path) -> Path:
    """The folder with the model of a run: the last checkpoint's actor; if there is none, ``<run>/model``, with which
    a recipe's training began.

    A checkpoint that holds only shards is merged with verl's own merger, once. Raises ConfigError if there is nothing.
    """
    actors = _actors(run)
    for actor in actors:
        for folder in (actor / "huggingface", actor / MEGATRON_EXPORT, actor / MERGED):
            if _has_weights(folder):
                return folder
        if list(actor.glob("model_world_size_*_rank_*.pt")):
            return _merge(actor)
        if (actor / MEGATRON_SHARDS).is_dir():
            raise ConfigError(
                f"{actor} holds Megatron's shards and no weights in Hugging Face's form; train with "
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model], which writes "
                f"{actor / MEGATRON_EXPORT}; or convert them (verl.model_merger --backend megatron) and give --model"
            )
    if _has_weights(run / "model"):
        return run / "model"
    looked = f"{run}/checkpoints/global_step_*/actor, {run}/model"
    raise ConfigError(f"no weights in {run} (looked for {looked}); save checkpoints, or give --model")


def _actors(run: Path) -> list[Path]:
    """The actors of all checkpoints, newest first."""
    steps = [
        (int(found.group(1)), folder)
        for folder in [*run.glob("global_step_*"), *run.glob("checkpoints/global_step_*")]
        if (found := _STEP.search(folder.name))
    ]
    return [folder / "actor" for _, folder in sorted(steps, reverse=True)]


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
