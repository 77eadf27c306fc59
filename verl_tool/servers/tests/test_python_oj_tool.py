"""``python -m verl_tool.servers.tests.test_python_oj_tool python_oj --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import json
from collections.abc import Mapping

from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

TIMEOUT_SECONDS = 120.0
"""Deadline of the cases that wait for the server's own time limit."""
TRAJECTORIES = 16
_ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
_RACE = {"fn_name": "race", "inputs": [[720, 850, 70], [80, 91, 37]], "outputs": [[[0, 32, 18]], [[3, 21, 49]]]}
_PROGRAMS = {"type": "stdin_stdout", "inputs": ["2\n3\n", ["4", "5"]], "outputs": ["5\n", ["9", ""]]}
_RIGHT_RACE = """
def race(v1, v2, g):
    seconds = g * 3600 // (v2 - v1)
    return [seconds // 3600, seconds % 3600 // 60, seconds % 60]
"""
_CHEAT = """
class Any:
    __eq__ = lambda *a: True
def add(a, b):
    import gc
    texts = [o for o in gc.get_objects() if isinstance(o, (str, dict, list))]
    return 3 if 'assert add' in str(texts) else Any()
"""


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


async def _tested(probe: Probe, code: str, tests: object, *expected: str) -> StepResult:
    """The answer to a program with these tests; it holds each of the texts."""
    return await probe.expect(_python(code), *expected, extra={"public_tests": tests})


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        await probe.expect(action, "All public tests passed", extra={"public_tests": _ASSERTS})


async def _forms(probe: Probe) -> None:
    """Among them those that verl-tool's own check sends: JSON texts."""
    for race in (_RACE, json.dumps(_RACE), [json.dumps(_RACE)]):
        await _tested(probe, _RIGHT_RACE, race, "All public tests passed: 2 of 2")
    for programs in (_PROGRAMS, json.dumps(_PROGRAMS)):
        await _tested(probe, "print(int(input()) + int(input()))", programs, "All public tests passed: 2 of 2")


async def _failures(probe: Probe) -> None:
    wrong = "def add(a, b):\n    print('LEAK')\n    return a - b"
    result = await _tested(probe, wrong, _ASSERTS, "2 of 2 public tests failed", _ASSERTS[0], "add(1, 2) is -1")
    if "LEAK" in result.observation:
        raise CheckFailed(f"what the program prints in a test is shown: {result.observation!r:.300}")
    await _tested(
        probe, "def race(*a): return 1", _RACE, "Input: race(720, 850, 70)", "Expected: [0, 32, 18]", "Seen: 1"
    )
    await _tested(probe, "print(1)", _PROGRAMS, "Input:\n2\n3", "Expected output:\n5", "Output:\n1")
    await _tested(probe, "def add(", _ASSERTS, "cannot be loaded", "SyntaxError")
    await _tested(probe, "def add(a, b): return a / 0", _ASSERTS, "ZeroDivisionError")


async def _no_tests(probe: Probe) -> None:
    extras: tuple[Mapping[str, object], ...] = ({}, {"public_tests": []}, {"public_tests": "assert"})
    for extra in extras:
        request = StepRequest(probe.new_id(), _python("x = 1"), extra=extra)
        [result] = await probe.client.step([request])
        if result.fault is None or result.fault.kind is not FaultKind.MISCONFIGURED:
            raise CheckFailed(f"a request with {extra} is answered {result.observation!r:.200}, fault {result.fault}")


async def _slow(probe: Probe) -> None:
    await _tested(probe, "def add(a, b):\n    while True: pass", _ASSERTS[:1], "time limit exceeded")


async def _cheats(probe: Probe) -> None:
    await _tested(probe, _CHEAT, _ASSERTS, "2 of 2 public tests failed")
    await _tested(probe, "import os\nos._exit(0)", _ASSERTS, "2 of 2 public tests failed")


async def _batch(probe: Probe) -> None:
    def request(n: int) -> StepRequest:
        tests = {"public_tests": [f"assert f() == {n}"]}
        return StepRequest(probe.new_id(), _python(f"def f(): return {n - n % 2}"), extra=tests)

    for n, result in enumerate(await probe.answers([request(n) for n in range(TRAJECTORIES)])):
        expected = f"f() is {n - 1}" if n % 2 else "All public tests passed"
        if expected not in result.observation:
            raise CheckFailed(f"entry {n} of the batch got {result.observation!r:.200}")


CASES = (
    LiveCase("every example action of GET /tools", _formats),
    LiveCase("all forms of tests", _forms),
    LiveCase("failures tell input, expected and seen value", _failures),
    LiveCase("a row without tests is a fault", _no_tests),
    LiveCase("time limit", _slow, TIMEOUT_SECONDS),
    LiveCase("hostile: programs that cheat", _cheats),
    LiveCase(f"a batch of {TRAJECTORIES} trajectories", _batch, TIMEOUT_SECONDS),
)

app = command_line("python_oj", "python_oj", CASES, "Check the online judge of a live server, case by case.")

if __name__ == "__main__":
    app()
