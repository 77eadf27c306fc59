"""Write files that appear whole: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; what the block leaves there takes the name `path` at its end.

    If the block raises, `path` is as before and nothing is left beside it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
