"""The benchmark of a step's images: each is a file of its own, and is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_module import load_script

pytest.importorskip("verl")
pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

pytestmark = pytest.mark.slow


async def test_files_are_counted_once() -> None:
    benchmark = load_script("image_memory", Path(__file__).parents[2] / "benchmarks" / "image_memory.py")
    first, second = await benchmark.measured(trajectories=3, images=2, steps=2)
    assert (first.step, second.step) == (1, 2)
    assert first.files == second.files > 0
    assert first.files <= first.packed < first.files + 1
    assert first.pixels == 3 * 2 * 24
