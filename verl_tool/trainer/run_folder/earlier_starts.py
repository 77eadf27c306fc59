"""What earlier starts left in a run's folder is moved to ``earlier/N``, so that no start writes over it.

A start that resumes from a checkpoint keeps what led to it, and moves only the steps behind. One that begins anew
(there is no checkpoint, or ``trainer.resume_mode=disable``) moves all but the data and the model that a recipe made.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from verl_tool.trainer.run_folder.checkpoints import TRACKER, resume_step

EARLIER = "earlier"
START_OUTPUTS = ("branches", "config.yaml", "learning_curve.png", "tensorboard")
"""What a training leaves, and what was made of its records, besides metrics, trajectories and checkpoints. Logs stay:
this start writes into them already."""
_NUMBERED = re.compile(r"(?:step|validation|baseline)_(\d+)\.(?:jsonl|tokens\.npz)", re.ASCII)
_IMAGES = "images"


def archive_earlier_start(config: DictConfig) -> Path | None:
    """Move what this start would write over or mix up; the folder where it lies then, if there was anything."""
    run, step = Path(config.run_dir), resume_step(config)
    trajectories = Path(config.trajectories_dir) if config.trajectories_dir else None
    if step is None:
        found = list(_find_earlier_start(run, trajectories, Path(config.trainer.default_local_dir)))
    else:
        found = [] if trajectories is None else list(_find_records_after(trajectories, step))
    moved: Path | None = None
    for path in found:
        if not path.exists():  # it went with the folder that holds it
            continue
        moved = moved or _get_next_folder(_get_root(path, run, trajectories))
        _move(path, _get_root(path, run, trajectories) / EARLIER / moved.name)
    return moved


def archive_records(path: Path) -> None:
    """Move a file of records that another start left, and the tokens beside it."""
    root = path.parent.parent
    folder = _get_last_folder(root)
    if folder is None or (folder / path.relative_to(root)).exists():
        folder = _get_next_folder(root)
    for each in (path, path.with_suffix(".tokens.npz")):
        if each.exists():
            _move(each, folder)


def _find_earlier_start(run: Path, trajectories: Path | None, checkpoints: Path) -> Iterator[Path]:
    has_records = trajectories is not None and any(_find_records_after(trajectories, -1))
    has_checkpoints = checkpoints.is_relative_to(run) and any(checkpoints.glob("global_step_*"))
    metrics = [path for path in run.glob("metrics*.jsonl") if path.is_file()]
    if not (has_records or has_checkpoints or any(path.stat().st_size for path in metrics)):
        return
    yield from metrics
    yield from (run / name for name in START_OUTPUTS if (run / name).exists())
    # Folders that hold the run's own stay where they are.
    if trajectories is not None and has_records:
        yield from _find_records_after(trajectories, -1) if run.is_relative_to(trajectories) else (trajectories,)
    if has_checkpoints:
        yield from (*checkpoints.glob("global_step_*"), checkpoints / TRACKER) if checkpoints == run else (checkpoints,)


def _find_records_after(trajectories: Path, step: int) -> Iterator[Path]:
    for path in _list_folder(trajectories):
        if (numbered := _NUMBERED.fullmatch(path.name)) and int(numbered[1]) > step:
            yield path


def _list_folder(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _get_root(path: Path, run: Path, trajectories: Path | None) -> Path:
    """Beside whose ``earlier`` a path goes: records may lie outside of the run's folder."""
    if trajectories is None or trajectories == run:
        return run
    return trajectories.parent if path == trajectories or path.parent == trajectories else run


def _move(path: Path, folder: Path) -> None:
    """Move a file or folder to its place below ``earlier/N``, with the images that its records name."""
    target = folder / path.name if _NUMBERED.fullmatch(path.name) is None else folder / path.parent.name / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
    images = path.parent / _IMAGES
    if path.suffix == ".jsonl" and _NUMBERED.fullmatch(path.name) and images.is_dir():
        shutil.copytree(images, target.parent / _IMAGES, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    if not os.path.exists(target):
        try:
            os.link(source, target)
        except OSError:  # a file system without hard links
            shutil.copy2(source, target)


def _get_last_folder(root: Path) -> Path | None:
    numbers = [int(path.name) for path in (root / EARLIER).glob("*") if path.name.isdecimal()]
    return root / EARLIER / str(max(numbers)) if numbers else None


def _get_next_folder(root: Path) -> Path:
    last = _get_last_folder(root)
    return root / EARLIER / str(1 if last is None else int(last.name) + 1)
