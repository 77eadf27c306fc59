"""Reading files of a folder that somebody else may have filled: no link leads out of it, no pipe is waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from verl_tool.errors import VerlToolError


class UnsafeFileError(VerlToolError, OSError):
    """A file is not a regular file, lies outside of its folder, or is larger than allowed."""


def open_confined(path: Path, folder: Path) -> BinaryIO:
    """Open a regular file inside `folder` for reading, in binary.

    Links are followed if their target is inside, too. Raises UnsafeFileError for anything else, and OSError as `open`.
    """
    real = Path(os.path.realpath(path, strict=True))
    if not real.is_relative_to(folder.resolve()):
        raise UnsafeFileError(
            f"{path} is a link to {real}, outside of {folder}; copy the file there, or name its folder"
        )
    # A pipe without a writer would wait for one.
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeFileError(f"{path} is not a regular file; remove it")
    return open(descriptor, "rb")


def read_confined(path: Path, folder: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises as `open_confined`, and UnsafeFileError if it has over `max_bytes` bytes."""
    with open_confined(path, folder) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnsafeFileError(f"{path} has more than {max_bytes} bytes")
    return content
