"""Against the real sandbox; one pool for the whole file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from tests.servers.tools.actions import results, text
from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools.base import ToolResult
from verl_tool.servers.tools.python_oj import PythonOJTool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ASSERTS = ["assert add(1, 1) == 2", "print('LEAK')\nassert add(2, 3) == 5", "assert add(0, 0) == 0"]
RACE = json.dumps(
    {"fn_name": "race", "inputs": [[720, 850, 70], [80, 91, 37]], "outputs": [[[0, 32, 18]], [[3, 21, 49]]]}
)
PROGRAMS = {"inputs": ["2\n", ["3"], "0"], "outputs": ["5\n", "3\n", "1"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool() -> AsyncIterator[PythonOJTool]:
    made = PythonOJTool(workers=1, test_seconds=1, timeout_seconds=5, max_output_length=1000)
    await made.start()
    yield made
    await made.close()


async def judged(tool: PythonOJTool, code: str, tests: object, **extra: object) -> ToolResult:
    [result] = await results(tool, f"```python\n{code}\n```", {"public_tests": tests, **extra})
    return result


@pytest.mark.parametrize("action", PythonOJTool.example_actions)
async def test_every_example_action_is_tested(tool: PythonOJTool, action: str) -> None:
    [result] = await results(tool, action, {"public_tests": ASSERTS})
    assert result.text == "All public tests passed: 3 of 3."
    assert result.done
    assert not result.error
    assert result.metrics["pass_rate"] == 1.0


async def test_asserts_show_what_they_saw_and_nothing_that_a_test_or_the_program_prints(tool: PythonOJTool) -> None:
    result = await judged(tool, "def add(a, b):\n    print('LEAK')\n    return a - b", ASSERTS)
    assert result.text == (
        "2 of 3 public tests failed.\n\n"
        "Test 1: wrong answer\nassert add(1, 1) == 2\nadd(1, 1) is 0\n\n"
        "Test 2: wrong answer\nprint('LEAK')\nassert add(2, 3) == 5\nadd(2, 3) is -1"
    )
    assert result.text.count("LEAK") == 1, "the test's own text"
    assert (result.error, result.done, result.valid) == (True, False, True)
    assert result.metrics["pass_rate"] == pytest.approx(1 / 3)


async def test_a_function_with_json_values(tool: PythonOJTool) -> None:
    result = await judged(tool, "def race(v1, v2, g):\n    return (0, 32, 18)", [RACE])
    assert result.text == (
        "1 of 2 public tests failed.\n\n"
        "Test 2: wrong answer\nInput: race(80, 91, 37)\nExpected: [3, 21, 49]\nSeen: (0, 32, 18)"
    )


async def test_programs_that_read_stdin(tool: PythonOJTool) -> None:
    code = "n = int(input())\nprint(10 // n)"
    result = await judged(tool, code, json.dumps(PROGRAMS))
    error = '  File "solution.py", line 2, in <module>\nZeroDivisionError: integer division or modulo by zero'
    assert result.text == (
        "1 of 3 public tests failed.\n\n"
        f"Test 3: runtime error\nInput:\n0\nExpected output:\n1\nOutput:\n(nothing)\nError:\n{error}"
    )
    wrong = await judged(tool, "print(int(input()) + 3)", PROGRAMS)
    assert "Test 2: wrong answer\nInput:\n3\nExpected output:\n3\nOutput:\n6\n\nTest 3" in wrong.text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def add(a, b):\n    return a +",
            "The program cannot be loaded: SyntaxError: invalid syntax (solution.py, line 2)",
        ),
        (
            "import sys\nsys.exit(3)",
            "The program cannot be loaded: the solution exited while it was loaded: SystemExit: 3",
        ),
        ("def ad(a, b): pass", "runtime error: NameError: name 'add' is not defined\nassert add(1, 1) == 2"),
        ("def add(a, b):\n    return a / 0", "ZeroDivisionError: division by zero (line 2 of the program)\nassert"),
        ("def add(a, b):\n    while True: pass", "Test 1: time limit exceeded: did not finish within 1 s"),
        ("import os\ndef add(a, b):\n    os._exit(0)", "Test 1: the program's process ended"),
        ("class Any:\n    __eq__ = lambda *a: True\ndef add(a, b): return Any()", "Test 1: the test was refused"),
    ],
)
async def test_how_else_a_test_may_fail(tool: PythonOJTool, code: str, words: str) -> None:
    result = await judged(tool, code, ASSERTS[:1])
    assert words in result.text
    assert result.error


async def test_failures_beyond_the_limit_are_only_numbered_and_long_values_are_cut(tool: PythonOJTool) -> None:
    tests = [f"assert f({n}) == ''" for n in range(5)]
    result = await judged(tool, "def f(x): return 'a' * 10**6", tests)
    assert result.text.startswith("5 of 5 public tests failed.")
    assert result.text.endswith("Failed too: 4, 5.")
    assert len(result.text) < 1100


async def test_tests_beyond_max_tests_are_not_run() -> None:
    tool = PythonOJTool(max_tests=2)
    suite, run = tool._job("", {"public_tests": ASSERTS})
    assert (len(suite), run.tests) == (2, 2)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "the request brings no extra field 'public_tests'"),
        ({"public_tests": None}, "brings no extra field"),
        ({"public_tests": "assert f()"}, "unreadable extra field 'public_tests': 'assert f()' is no JSON"),
        ({"public_tests": {"inputs": [1], "outputs": []}}, "1 'inputs' and 0 'outputs'"),
    ],
)
async def test_a_row_without_tests_is_a_fault(tool: PythonOJTool, extra: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ToolFault) as caught:
        await results(tool, "```python\n1\n```", extra)
    assert words in caught.value.message
    assert "extra_info.tools_kwargs.public_tests" in caught.value.message
    assert (caught.value.kind, caught.value.retryable) == (FaultKind.MISCONFIGURED, False)


async def test_the_trajectory_goes_on_where_the_options_say_so(tool: PythonOJTool) -> None:
    other = PythonOJTool(done_if_passed=False)
    other.sandbox = tool.sandbox
    [result] = await results(other, PythonOJTool.example_actions[0], {"public_tests": ASSERTS})
    assert not result.done


async def test_a_tool_that_was_not_started_is_a_fault() -> None:
    with pytest.raises(SandboxError, match="has not been started"):
        await text(PythonOJTool(), "<python>1</python>", {"public_tests": ASSERTS})


async def test_a_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot enforce a policy"):
        PythonOJTool(allowed_modules=["math"])
    assert PythonOJTool(allowed_modules=None, restricted_functions=[]).options.allowed_modules is None


async def test_python_by_itself_is_the_tool_that_needs_no_tests() -> None:
    assert tool_class("python").name == "python_code"
