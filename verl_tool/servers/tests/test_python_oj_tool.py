"""``python -m verl_tool.servers.tests.test_python_oj_tool python_oj --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import json

from verl_tool.protocol import FaultKind
from verl_tool.servers.tests.live_check import WAITS, LiveCase, LiveTurn, command_line, examples, one_by_one, together

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
_LEAK = "def add(a, b):\n    print('LEAK')\n    return a - b"
_SUM = "print(int(input()) + int(input()))"
_PASSED, _FAILED = "All public tests passed", "2 of 2 public tests failed"


def _test(code: str, tests: object, *contains: str, lacks: tuple[str, ...] = ()) -> LiveTurn:
    return LiveTurn(f"```python\n{code}\n```", contains, lacks, extra={"public_tests": tests})


_FORMS = (
    *(_test(_RIGHT_RACE, race, f"{_PASSED}: 2 of 2") for race in (_RACE, json.dumps(_RACE), [json.dumps(_RACE)])),
    *(_test(_SUM, programs, f"{_PASSED}: 2 of 2") for programs in (_PROGRAMS, json.dumps(_PROGRAMS))),
)
"""Among them those that verl-tool's own check sends: JSON texts."""
_FAILURES = (
    _test(_LEAK, _ASSERTS, _FAILED, _ASSERTS[0], "add(1, 2) is -1", lacks=("LEAK",)),
    _test("def race(*a): return 1", _RACE, "Input: race(720, 850, 70)", "Expected: [0, 32, 18]", "Seen: 1"),
    _test("print(1)", _PROGRAMS, "Input:\n2\n3", "Expected output:\n5", "Output:\n1"),
    _test("def add(", _ASSERTS, "cannot be loaded", "SyntaxError"),
    _test("def add(a, b): return a / 0", _ASSERTS, "ZeroDivisionError"),
)
_ROWS: tuple[dict[str, object], ...] = ({}, {"public_tests": []}, {"public_tests": "assert"})
_NO_TESTS = [LiveTurn("```python\nx = 1\n```", extra=extra, fault=FaultKind.MISCONFIGURED) for extra in _ROWS]
_BATCH = [
    _test(f"def f(): return {n - n % 2}", [f"assert f() == {n}"], f"f() is {n - 1}" if n % 2 else _PASSED)
    for n in range(TRAJECTORIES)
]
_SLOW = _test("def add(a, b):\n    while True: pass", _ASSERTS[:1], "time limit exceeded")
_CHEATS = (_test(_CHEAT, _ASSERTS, _FAILED), _test("import os\nos._exit(0)", _ASSERTS, _FAILED))

CASES = (
    examples(_PASSED, extra={"public_tests": _ASSERTS}),
    LiveCase("all forms of tests", one_by_one(*_FORMS)),
    LiveCase("failures tell input, expected and seen value", one_by_one(*_FAILURES)),
    LiveCase("a row without tests is a fault", one_by_one(*_NO_TESTS)),
    LiveCase("time limit", one_by_one(_SLOW), WAITS),
    LiveCase("hostile: programs that cheat", one_by_one(*_CHEATS)),
    LiveCase(f"a batch of {TRAJECTORIES} trajectories", together(*_BATCH), WAITS),
)

app = command_line(__name__, "python_oj", "python_oj", CASES)
