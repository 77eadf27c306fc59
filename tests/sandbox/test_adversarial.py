"""Every snippet of the hostile corpus, against one pool, several at a time; each must hold its predicate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hostile_ground import OUTPUT_CAP, HostileGround, Outcome

from verl_tool.sandbox import Limits, SandboxPool

CORPUS = json.loads((Path(__file__).parent / "adversarial.json").read_text())
AT_ONCE = 4
"""Snippets of one batch run side by side; what is left over is looked for when all of them have ended, and counts
against each of them."""
TWICE = {"rng-dup"}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HostileGround]:
    async with HostileGround(SandboxPool(workers=2), tmp_path_factory.mktemp("canary")) as ground:
        yield ground


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def names(ground: HostileGround) -> AsyncIterator[dict[str, dict[str, object]]]:
    """What each predicate may speak of, by snippet; filled batch by batch."""
    filled: dict[str, dict[str, object]] = {}
    for first in range(0, len(CORPUS), AT_ONCE):
        batch = CORPUS[first : first + AT_ONCE]
        runs = [(case, _unleash(ground, case)) for case in batch]
        runs += [(case, _unleash(ground, case)) for case in batch if case["id"] in TWICE]
        outcomes = await asyncio.gather(*(run for _, run in runs))
        seen = await ground.witness(outcomes)
        for (case, _), outcome in zip(runs, outcomes, strict=True):
            earlier = filled.get(case["id"])
            distinct = earlier is None or not _numbers(earlier["out"]) & _numbers(outcome.result.stdout_raw)
            filled[case["id"]] = {
                **outcome.names(),
                **seen,
                "limit": case["limit_s"],
                "rng_distinct": earlier is not None and distinct,
            }
    yield filled


async def _unleash(ground: HostileGround, case: dict) -> Outcome:  # type: ignore[type-arg]
    return await ground.unleash(case["code"], Limits(wall_seconds=case["limit_s"], output_bytes=OUTPUT_CAP))


def _numbers(output: object) -> set[bytes]:
    assert isinstance(output, bytes)
    return set(output.split())


@pytest.mark.parametrize("case", CORPUS, ids=[case["id"] for case in CORPUS])
async def test_holds(case: dict, names: dict[str, dict[str, object]]) -> None:  # type: ignore[type-arg]
    known = names[case["id"]]
    predicate = case["expected_true"]
    held = eval(predicate, {"__builtins__": __builtins__}, known)  # noqa: S307  (our own file's expression)
    shown = {name: value if not isinstance(value, bytes) else value[-600:] for name, value in known.items()}
    assert held, f"{predicate}\n{shown}"
    assert known["victim_alive"]
