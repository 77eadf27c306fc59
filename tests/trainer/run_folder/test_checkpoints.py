"""The last step is saved, and a checkpoint that could not be saved leaves the one before."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.trainer.run_folder.checkpoints import (
    LAST_STEP_ONLY,
    TRACKER,
    atomic_checkpoint,
    latest_step,
    save_last_step,
)
from verl_tool.trainer.run_folder.disk_full import is_disk_full


@pytest.mark.parametrize(
    ("save_last", "freq", "saved_every"), [(True, -1, LAST_STEP_ONLY), (True, 5, 5), (False, -1, -1)]
)
def test_the_last_step_is_saved_unless_save_last_is_false(save_last: bool, freq: int, saved_every: int) -> None:
    config = OmegaConf.create({"save_last": save_last, "trainer": {"save_freq": freq}})
    save_last_step(config)
    assert config.trainer.save_freq == saved_every


def save(folder: Path, step: int, error: OSError | None = None, rotated: str = "") -> None:
    """As verl does: the weights, then the tracker; `error` meets the tracker, which is empty then.

    `rotated`: what is removed as soon as the weights are there, as with ``trainer.max_actor_ckpt_to_keep=1``.
    """
    with atomic_checkpoint(folder, step):
        (folder / f"global_step_{step}/actor").mkdir(parents=True)
        if rotated:
            shutil.rmtree(folder / rotated)
        (folder / f"global_step_{step}/data.pt").write_bytes(b"x")
        (folder / TRACKER).write_text("" if error else str(step))
        if error:
            raise error


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, full)
    assert latest_step(tmp_path) is None
    save(tmp_path, 4)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 6, full)
    assert latest_step(tmp_path) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_4", TRACKER]


def test_the_only_weights_stay_where_verl_has_removed_those_before(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 6, OSError(errno.ENOSPC, "No space left on device"), rotated="global_step_4/actor")
    assert (tmp_path / "global_step_6/actor").is_dir()
    with pytest.raises(ConfigError, match=r"says '4', and there are global_step_6; write the number"):
        latest_step(tmp_path)


def test_a_full_disk_is_known_in_a_library_s_words() -> None:
    died = ValueError("the worker died")
    died.__cause__ = RuntimeError("[enforce fail at inline_container.cc:659] PytorchStreamWriter: file write failed")
    assert is_disk_full(died)
    assert is_disk_full(OSError(errno.EDQUOT, "x"))
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))


def test_a_full_disk_of_a_tool_that_an_error_quotes_is_none_here() -> None:
    quotes = VerlToolError("9 of 9 calls failed. The most frequent: [Errno 28] No space left on device")
    assert not is_disk_full(quotes)
    assert not is_disk_full(RayTaskError("run", f"Traceback: {quotes}", quotes).as_instanceof_cause())
    quotes.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_full(quotes)
