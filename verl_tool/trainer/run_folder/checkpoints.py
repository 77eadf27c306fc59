"""Which checkpoint a start resumes from, and checkpoints that are saved whole or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from verl_tool.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the step of the last checkpoint, which it writes when all else of one is there."""
LAST_STEP_ONLY = (1 << 31) - 1
"""``trainer.save_freq`` with which verl saves behind the last step alone."""
_STEP = re.compile(r"global_step_(\d+)/?$", re.ASCII)


def save_last_step(config: DictConfig) -> None:
    """Let the last step be saved where no other is (``trainer.save_freq=-1``), unless ``save_last=false``."""
    if config.save_last and config.trainer.save_freq <= 0:
        config.trainer.save_freq = LAST_STEP_ONLY


def latest_step(folder: Path) -> int | None:
    """The step of the last whole checkpoint in a folder of checkpoints; None if there is none.

    Raises ConfigError if the folder's own word of it cannot be read, or names a checkpoint that is gone. Of one that it
    removes verl leaves a folder without ``actor``.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    there = sorted(
        int(found[1])
        for path in folder.glob("global_step_*")
        if (found := _STEP.search(path.name)) and (path / "actor").is_dir()
    )
    if text.isdecimal() and int(text) in there:
        return int(text)
    have = f"there are {', '.join(f'global_step_{step}' for step in there)}" if there else "there is no checkpoint"
    raise ConfigError(
        f"{tracker} says {text!r}, and {have}; write the number of the last whole one into it (where a critic is "
        "trained, one with critic/ too), or remove the file to begin anew"
    )


def resume_step(config: DictConfig) -> int | None:
    """The step of this run after which verl would go on; None if the training begins anew, or elsewhere."""
    folder = Path(config.trainer.default_local_dir)
    if config.trainer.resume_mode == "auto":
        return latest_step(folder)
    if config.trainer.resume_mode != "resume_path":
        return None
    path = Path(str(config.trainer.resume_from_path)).resolve()
    found = _STEP.search(str(path))
    return int(found[1]) if found and path.parent == folder else None


@contextmanager
def atomic_checkpoint(folder: Path, step: int) -> Iterator[None]:
    """Within the block verl saves the checkpoint of `step`. If that fails, the one before is the last again.

    With few to keep, verl has removed the weights of the one before as soon as the new ones were there; then both stay.
    """
    tracker = folder / TRACKER
    before = tracker.read_bytes() if tracker.is_file() else None
    last = folder / f"global_step_{(before or b'').decode(errors='replace').strip()}"
    parts = _parts(last)
    there = (folder / f"global_step_{step}").exists()
    try:
        yield
    except BaseException:
        # First the room: what was written of this one cannot be resumed from.
        if not there and parts == _parts(last):
            shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)
        if before is not None and tracker.read_bytes() != before:
            tracker.write_bytes(before)
        elif before is None:
            tracker.unlink(missing_ok=True)
        raise


def _parts(checkpoint: Path) -> set[str]:
    """Such as ``actor`` and ``critic``."""
    return {path.name for path in checkpoint.glob("*") if path.is_dir()}
