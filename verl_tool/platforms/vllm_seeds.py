"""Seeded requests on vLLM's CPU build, whose random generators cannot be wound back. Written for vLLM 0.28.0.

vLLM samples a token for a prompt that is read in parts even where a part is not the last, throws the token away, and
takes the request's generator back by four numbers. torch's CPU generator counts none and raises: one seeded request
whose prompt is split between two steps ends the engine. Here the generator's state is kept and restored, which comes to
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def windable(runner: type) -> type:
    """The CPU's model runner, made so that a token thrown away leaves no trace in its request's generator."""
    if getattr(runner, "_sample", None) is _sample:
        return runner
    _originals.update(_sample=runner._sample, _bookkeeping_sync=runner._bookkeeping_sync)  # type: ignore[attr-defined]
    runner._sample = _sample  # type: ignore[attr-defined]
    runner._bookkeeping_sync = _bookkeeping_sync  # type: ignore[attr-defined]
    return runner


_originals: dict[str, Any] = {}


def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _rewound(self):
        return _originals["_sample"](self, *args, **kwargs)


def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
    # It uses the generators for nothing but to wind them back.
    generators, self.input_batch.generators = self.input_batch.generators, {}
    try:
        return _originals["_bookkeeping_sync"](self, *args, **kwargs)
    finally:
        self.input_batch.generators = generators


@contextmanager
def _rewound(runner: Any) -> Iterator[None]:
    """Afterwards the generators of requests whose token is thrown away are as before."""
    batch = runner.input_batch
    thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    generators = [batch.generators[i] for i in map(int, thrown_away) if i in batch.generators]
    states = [generator.get_state() for generator in generators]
    yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
