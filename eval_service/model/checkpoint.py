"""The newest weights of a training run, in the form that engines read."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_tool.errors import ConfigError

MERGE_SECONDS = 3600.0
MERGED = "merged"
"""Folder, beside a checkpoint's shards, of the weights put together from them."""
MEGATRON_EXPORT = Path("model", "huggingface")
"""Where Megatron's bridge writes the weights of a checkpoint."""
MEGATRON_SHARDS = Path("model", "dist_ckpt")
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the step of the last checkpoint that is whole."""
_STEP = re.compile(r"global_step_(\d+)$")
_PART = re.compile(r"-of-0*(?!1\b)\d+\.")
"""In the name of a file with a part of the weights."""


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a training after one of its steps."""

    run: str
    step: int
    model: Path
    """Folder with the weights in Hugging Face's form."""
    without_weights: tuple[int, ...] = ()
    """Steps whose folders were looked at before and hold no weights: saving them was broken off."""

    def __str__(self) -> str:
        later = ", ".join(f"global_step_{step}" for step in self.without_weights)
        return f"step {self.step} of {self.run}" + (f" (no weights in {later})" if later else "")


def newest_checkpoint(run: Path) -> Checkpoint:
    """The last checkpoint of a run that has weights. One that holds only shards is merged with verl's own merger, once.
    Raises ConfigError if there is none; the model with which a training began is none."""
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
    looked = ", ".join(str(folder / "global_step_*/actor") for folder in _folders(run)[1:])
    raise ConfigError(
        f"no checkpoint in {run} (looked for {looked}): the training saved none, or has not "
        f"come to its first; the last step is saved by default (save_last=true){untrained}; else give --model"
    )


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
    """Steps and actors of all checkpoints, newest first; at the end those that verl has not come to the end of."""
    steps = []
    for folder in _folders(run):
        whole = _tracked_step(folder)
        for path in folder.glob("global_step_*"):
            if found := _STEP.search(path.name):
                step = int(found.group(1))
                steps.append((whole is None or step <= whole, step, path))
    return [(step, path / "actor") for _, step, path in sorted(steps, reverse=True)]


def _tracked_step(folder: Path) -> int | None:
    try:
        text = (folder / TRACKER).read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _folders(run: Path) -> list[Path]:
    """Where checkpoints of a run may be: its own places, and what its config says (``trainer.default_local_dir``)."""
    folders = [run, run / "checkpoints"]
    config = run / "config.yaml"
    if config.is_file():
        configured = _configured_folder(config, config.stat().st_mtime_ns)
        if configured is not None:
            folders.append(run / configured)  # an absolute path stays as it is
    different: dict[Path, Path] = {}
    for folder in folders:
        different.setdefault(folder.resolve(), folder)
    return list(different.values())


@functools.lru_cache(maxsize=1024)
def _configured_folder(config: Path, changed: int) -> Path | None:
    """As `config`, last `changed` then, says; relative to the run's folder if it is in it, for that may have moved."""
    try:
        content = yaml.load(config.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        folder, run = Path(content["trainer"]["default_local_dir"]), Path(content["run_dir"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return folder.relative_to(run) if folder.is_relative_to(run) else folder


def _has_weights(folder: Path) -> bool:
    """Whether all files are there: a save that was broken off may have left some."""
    if not (folder / "config.json").is_file():
        return False
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = {path.name for path in folder.glob(pattern)}
        index = next(folder.glob(f"{pattern}.index.json"), None)
        if index is not None:
            if files and _indexed(index) <= files:
                return True
        elif any(_PART.search(name) is None for name in files):
            return True
    return False


def _indexed(index: Path) -> set[str]:
    """The files that an index names; a name that no file has if it cannot be read."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {""}


def _merge(actor: Path) -> Path:
    """Merge the shards into a folder that appears whole: a merge that is ended leaves none to be served."""
    target = actor / MERGED
    with tempfile.TemporaryDirectory(prefix=f".{MERGED}.", dir=actor) as scratch:
        merged = Path(scratch) / MERGED
        _run_merger(actor, merged)
        if target.exists():  # a part that an ended merge has left
            target.rename(Path(scratch) / "earlier")
        merged.rename(target)
    return target


def _run_merger(actor: Path, target: Path) -> None:
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
        raise ConfigError(f"verl's merger left no weights; merge {actor} by hand and give --model")
