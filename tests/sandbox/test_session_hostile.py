"""Every hostile program in a session: it is held as in a run, and the session goes on after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hostile_ground import OUTPUT_CAP, HostileGround, Outcome
from test_adversarial import CORPUS
from test_hostile import ATTACKS, WALL_SECONDS

from verl_tool.sandbox import Limits, SandboxPool

AT_ONCE = 8
SPARE_SECONDS = 3.0
"""For an interpreter to roll back a cell, and for the forkserver to kill one that does not, while others do it too."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

Programs = dict[str, tuple[str, str, float]]
"""Code, predicate and wall limit, by name."""
PROGRAMS: Programs = {
    **{
        case["id"]: (case["code"], case["expected_true"], case["limit_s"]) for case in CORPUS if case["id"] != "rng-dup"
    },
    **{name: (code, predicate, WALL_SECONDS) for name, (code, predicate) in ATTACKS.items()},
}

DIFFERENT = {
    # One socket is there besides, over which a cell's process takes over from its parent; others' words are ignored.
    "fake-protocol-reply": "out.count(b'WROTE') == 1 and result.state == 'kept'",
    "fd-leak": "len(eval(out)) <= 5",
    "inherited-descriptors": "out.count('GOT') == 1 and 'socket' in out and rc == 0",
    "exit-hooks-that-hang": "'end' in out and result.state == 'kept'",  # they are run when a program ends, not a cell
    "no-descriptors-left": "'ZeroDivisionError' in err and result.state == 'rolled_back'",
}
"""Predicates of those that see something else in a session."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[dict[str, tuple[Outcome, dict[str, object]]]]:
    """How each that was asked for went and what was seen around it, several at a time."""
    filled: dict[str, tuple[Outcome, dict[str, object]]] = {}
    async with HostileGround(SandboxPool(workers=1), tmp_path_factory.mktemp("canary")) as ground:
        names = [item.callspec.params["name"] for item in request.session.items if item.fspath == request.fspath]
        for first in range(0, len(names), AT_ONCE):
            batch = names[first : first + AT_ONCE]
            done = await asyncio.gather(*(_unleash(ground, *PROGRAMS[name]) for name in batch))
            around = await ground.witness(done)
            filled.update({name: (outcome, around) for name, outcome in zip(batch, done, strict=True)})
        yield filled


async def _unleash(ground: HostileGround, code: str, _: str, wall_seconds: float) -> Outcome:
    return await ground.unleash_in_session(code, Limits(wall_seconds=wall_seconds, output_bytes=OUTPUT_CAP))


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_session_holds_it(name: str, seen: dict[str, tuple[Outcome, dict[str, object]]]) -> None:
    outcome, around = seen[name]
    _, predicate, limit = PROGRAMS[name]
    predicate, result = DIFFERENT.get(name, predicate), outcome.result
    known = {**outcome.names(), **around, "limit": limit + SPARE_SECONDS - 2, "result": result}
    if name in ATTACKS:
        known |= {"out": result.stdout, "err": result.stderr}
    shown = f"{predicate}\n{result.stdout[-500:]!r} {result.stderr[-800:]!r} {outcome} {around}"
    assert eval(predicate, {"__builtins__": __builtins__}, known), shown  # noqa: S307  (our own expression)
    assert outcome.next_ok
    assert outcome.wall < limit + SPARE_SECONDS
    assert around["leftover"] == 0
    assert around["server_alive"]
    assert around["victim_alive"]
    assert around["host_unchanged"]
    assert not around["canary_leaked"]
