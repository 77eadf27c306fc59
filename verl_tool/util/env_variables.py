"""Environment variables of this process that are set for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_unless_set(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block, each of these variables that is not set has the value given here.

    What else is set in the block stays set: `ray.init` tells the processes that are started later, by
    ``RAY_AUTH_MODE``, that its cluster asks for a token.
    """
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
