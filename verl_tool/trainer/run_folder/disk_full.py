"""Whether an error means that a disk is full, in whichever words a library tells it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from verl_tool.errors import VerlToolError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "Disk quota exceeded", "file write failed", "OutOfDiskError")
"""Of the C library, of PyTorch's zip writer (``PytorchStreamWriter failed writing file``), and of Ray."""


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or an error that led to it, in another process too, is that of a full disk.

    The words are not looked for where an error is our own: it may quote those of another machine, such as a tool's.
    """
    chain = list(_chain(error))
    if any(isinstance(each, OSError) and each.errno in _FULL for each in chain):
        return True
    local = any(isinstance(each, VerlToolError) for each in chain)
    return not local and any(word in str(each) for each in chain for word in _WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[object] = [error]
    while todo:
        each = todo.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            todo += [each.__cause__, each.__context__, getattr(each, "cause", None)]
