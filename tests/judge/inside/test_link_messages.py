"""A solution that answers the judge in the protocol's own words, and hides what is no answer in plain data."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from verl_tool.judge.code_tests import Verdicts

Judge = Callable[..., Awaitable[Verdicts]]
in_module_loop = pytest.mark.asyncio(loop_scope="module")

ANSWERS = {
    # numpy asks any object for __array_interface__, and its attributes are the record's.
    "no_elements": """["Record", "P", ["__array_interface__"], [["dict", [["shape", ["tuple", [0]]],
        ["typestr", "<f8"], ["data", ["bytes", "00"]], ["version", 3]]]]]""",
    "memory": """["Record", "P", ["__array_interface__"], [["dict", [["shape", ["tuple", [1]]],
        ["typestr", "<f8"], ["data", ["bytes", "000000000000f87f"]], ["version", 3]]]]]""",
    "called": '["Record", "P", ["__array__"], [["solution", 0]]]',
    "text_for_a_float": '["numpy", "<f8", [], ["n" "an"], False]',
    "text_for_a_complex": '["numpy", "<c16", [], ["n" "an"], False]',
    "too_large_for_its_type": '["numpy", "<f2", [1], [1e30], True]',
    "texts": '["numpy", "|S3", [1], ["n" "an"], True]',
    "objects": '["numpy", "<f8", [1], [["solution", 0]], True]',
    "no_number": '"n" "an"',
    "no_numbers": '["list", [" +N" "aN "]]',
    "nothing": "None",
    "nothing_listed": '["list", [None]]',
    "empty_view": '["dict_keys", []]',
    "handle_in_a_view": '["dict_values", [["solution", 0]]]',
    "a_function_of_the_tests": '["judge", 1]',
    "an_iterator_of_the_tests": '["iterator", 1]',
    "a_library": '["library", "builtins", "eval"]',
    "deque_of_none": '["deque", [1], 0]',
    "far_too_deep": "deep",
}
SOLUTION = """
import gc, json, functools
deep = functools.reduce(lambda inner, _: ["list", [inner]], range(5000), 1)
Link = type(next(o for o in gc.get_objects() if type(o).__name__ == "SolutionLink"))
send = Link._send_text
def answer(value, args=2):
    def once(link, text):
        Link._send_text = send
        try: text = json.dumps({"value": value, "same": None, "after": [None] * args})
        except RecursionError: pass
        send(link, text)
    Link._send_text = once
def err(error):
    def once(link, text):
        Link._send_text = send
        send(link, json.dumps({"error": error}))
    Link._send_text = once
def forged(x):
    err([["KeyError"], "x", [["solution", 0]], [["__class__", 1], ["args", ["list", []]], ["x", ["solution", 0]]]])
def odd(x): err(x)
""" + "\n".join(f"def {name}(x): answer({text})" for name, text in ANSWERS.items())
FORMS = (
    "assert {f}(1) == {A}",
    "assert not abs({f}(1) - {A}) > 1e-6",
    "assert sorted({f}(1)) == [{A}]",
    "assert {f}(1) in ['{A}']",
    "assert not {f}(1) != {A}",
    "if abs(float({f}(1)) - {A}) > 1e-6:\n    raise AssertionError",
    "import numpy as np\nassert np.allclose({f}(1), {A}.0)",
    "import numpy as np\nassert (np.asarray({f}(1)) == {A}).all()",
    "import numpy as np\nassert not np.any(np.abs(np.asarray({f}(1)) - {A}) > 1e-6)",
    "import numpy as np\nassert not np.any(np.abs(np.asarray({f}(1), dtype=float) - {A}) > 1e-6)",
    "import numpy as np\nassert not (np.abs(np.array([{A}.0]) - {f}(1)) > 1e-6).any()",
    "import numpy as np\nassert np.isclose({f}(1), {A}.5).all()",
    "import pytest\nassert {f}(1) == pytest.approx({A}.5)",
)


@in_module_loop
async def test_no_message_passes_for_an_answer(judge: Judge) -> None:
    number = random.Random().randint(10**6, 10**7)
    tests = [form.format(f=name, A=number) for name in ANSWERS for form in FORMS]
    verdicts = await judge(SOLUTION, *tests, test_seconds=20.0, total_seconds=120.0)
    assert [(test, v) for test, v in zip(tests, verdicts.of, strict=True) if v.passed] == []
    assert not [v for v in verdicts.of if v.reason in ("budget", "load", "no verdict", "time")]


@in_module_loop
async def test_no_error_brings_more_than_plain_data(judge: Judge) -> None:
    tests = [
        "try:\n    forged(1)\nexcept KeyError as e:\n    assert e.args != ('x',)",
        *(f"try:\n    odd({error})\nexcept Exception:\n    pass\nassert odd" for error in ("[]", "3", "[1, 2, 3, 4]")),
        "try:\n    odd([['ValueError'], 'x', [float('n' 'an')], []])\nexcept ValueError as e:\n    assert e.args[0]",
    ]
    verdicts = await judge(SOLUTION, *tests)
    assert {v.reason for v in verdicts.of} == {"ended"}, verdicts


@in_module_loop
@pytest.mark.parametrize("text", ["nonsense", '["dict", 1]', '["judge", 1]'])
async def test_a_global_of_no_form_ends_the_solution(judge: Judge, text: str) -> None:
    listed = ["list", [["tuple", ["f", "value", text]]]]
    verdicts = await judge(f"{SOLUTION}\nanswer({listed!r}, 1)", "assert f is not None")
    assert {v.reason for v in verdicts.of} == {"ended"}, verdicts


EMPTY = """
def f(x): return []
def zip(*a): return [(0, 0)]
def range(*a): return [0]
def sqrt(x): return 0
def pow(*a): return 0
def max(*a): return 0
def len(x): return 0
def int(x): return 0
class hashlib:
    def md5(x): return hashlib()
    def hexdigest(self): return []
class pytest:
    def approx(*a): return []
    def raises(*a): return pytest()
    def __enter__(self): pass
    def __exit__(self, *a): return True
"""
WITHOUT_A_RIGHT_ANSWER = (
    "import numpy as np\nassert np.allclose(f([]), {A}.0)",
    "import numpy as np\nassert np.allclose(f({{}})[0:], {A}.0) and np.allclose(f([1.0]), {A}.0)",
    "import numpy as np\nout = []\nfor x in [1]:\n    out.append(f(x))\nassert np.allclose(out, [{A}.0])",
    "for i in range(3):\n    assert sqrt(i * i * {A}) == i",
    "for a, b in zip([{A}], [1]):\n    assert sqrt(a) == b",
    "assert sqrt({A}) == int('4')",
    "assert max([1, {A}]) == len([1, 2])",
    "assert ceil({A}.0) == int('{A}')",
    "assert int('{A}') == ceil({A}.0)",
    "assert max([1, {A}]) == pow(7, 2)",
    "assert f('a') == hashlib.md5(b'{A}').hexdigest()",
    "assert f('a') == pytest.approx({A})",
    "with pytest.raises(ValueError):\n    assert f({A}) == 1\nassert f is not None",
)


@in_module_loop
async def test_what_a_test_needs_beside_the_solution_is_pythons_own(judge: Judge) -> None:
    number = random.Random().randint(10**6, 10**7)
    tests = [test.format(A=number) for test in WITHOUT_A_RIGHT_ANSWER]
    verdicts = await judge(EMPTY, *tests, test_seconds=20.0, total_seconds=60.0)
    assert [(test, v) for test, v in zip(tests, verdicts.of, strict=True) if v.passed] == []
