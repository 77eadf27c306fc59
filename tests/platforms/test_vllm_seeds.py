"""Generators of requests whose token is thrown away."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from verl_tool.platforms.vllm_seeds import windable  # noqa: E402


class Runner:
    """As vLLM's: samples for every request, then takes back the generators of those that are not at their end."""

    def __init__(self, generators: dict[int, torch.Generator], thrown_away: list[bool]) -> None:
        self.input_batch = SimpleNamespace(generators=generators, num_reqs=len(thrown_away))
        self.discard_request_mask = SimpleNamespace(np=np.array([*thrown_away, True, True]))

    def _sample(self, count: int) -> list[float]:
        generators = self.input_batch.generators
        return [float(torch.rand(count, generator=generators.get(i))[0]) for i in range(self.input_batch.num_reqs)]

    def _bookkeeping_sync(self) -> str:
        for i in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator = self.input_batch.generators.get(int(i))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return "kept"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_without_it_the_engine_would_end():
    runner = Runner({0: seeded()}, [True])
    runner._sample(3)
    with pytest.raises(RuntimeError, match="offset"):
        runner._bookkeeping_sync()


def test_what_is_thrown_away_leaves_no_trace():
    windable(windable(type("Patched", (Runner,), {})))
    patched = windable(type("Patched", (Runner,), {}))
    # Unseeded, thrown away, kept, thrown away.
    generators = {1: seeded(), 2: seeded(), 3: seeded()}
    runner = patched(generators, [False, True, False, True])
    first = runner._sample(3)
    assert runner._bookkeeping_sync() == "kept"
    assert runner.input_batch.generators is generators
    assert first[1:] == [first[1]] * 3
    second = runner._sample(3)
    assert second[1] == second[3] == first[1]
    assert second[2] != first[2]
