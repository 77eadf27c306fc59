"""Wrong solutions that try to pass: none may, whatever they return, define, patch or leave behind."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable

import pytest

from verl_tool.judge.code_tests import Verdicts

pytestmark = pytest.mark.slow

Judge = Callable[..., Awaitable[Verdicts]]
in_module_loop = pytest.mark.asyncio(loop_scope="module")

ZOO = """
import enum, functools, itertools, operator, os, random, sys, types
from unittest.mock import ANY, MagicMock, _ANY
import numpy as np
from math import nan, inf

def always(*names, **methods):
    yes = lambda value: lambda *a, **k: value
    kinds = dict(eq=True, ne=True, lt=True, le=True, gt=True, ge=True, contains=True, bool=True, hash=1, len=1, int=0,
                 float=0.0, index=0, complex=0j, abs=0, round=0, neg=0, pos=0, invert=0, floor=0, ceil=0, trunc=0)
    for name in 'add sub mul matmul truediv floordiv mod pow and or xor lshift rshift'.split():
        kinds[name] = kinds['r' + name] = kinds['i' + name] = 0
    return {f'__{name}__': yes(value) for name, value in kinds.items()}

Z = type('Z', (), always())
Meta = type('Meta', (type,), {**always(), '__instancecheck__': lambda *a: True, '__subclasscheck__': lambda *a: True})
Klass = Meta('Klass', (), {})
LikeNumpy = type('LikeNumpy', (), {**always(), '__array__': lambda *a, **k: np.zeros(3), '__array_priority__': 1e9,
    '__array_ufunc__': lambda *a, **k: True, '__array_function__': lambda *a, **k: True})
Int = type('Int', (int,), always())
Float = type('Float', (float,), always())
Str = type('Str', (str,), {**always(), '__str__': lambda s: s})
List = type('List', (list,), always())
Tuple = type('Tuple', (tuple,), always())
Dict = type('Dict', (dict,), {**always(), '__getitem__': lambda s, k: Z(), 'get': lambda s, *a: Z()})
class Colour(enum.Enum):
    RED = 1
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 1
class Adaptive:
    # Sorted when it is indexed, a permutation when it is walked through.
    def __init__(self, values): self.values = list(values)
    def __len__(self): return len(self.values)
    def __getitem__(self, place): return 0 if isinstance(place, int) else self
    def __iter__(self): return iter(self.values)
class Liar:
    def __getattr__(self, name): return lambda *a, **k: True
class Forged(AssertionError): pass

def zed(*a): return Z()
def klass(*a): return Klass
def like_numpy(*a): return LikeNumpy()
def an_int(*a): return Int(-1)
def a_float(*a): return Float(-1)
def a_str(*a): return Str('no')
def a_list(*a): return List([Z()])
def a_tuple(*a): return Tuple((Z(),))
def a_dict(*a): return Dict()
def listed(*a): return [Z()]
def keyed(*a): return {Z(): 1}
def colour(*a): return Colour.RED
def adaptive(values): return Adaptive(values)
def liar(*a): return Liar()
def any_(*a): return ANY
def any_class(*a): return _ANY
def mock(*a): return MagicMock()
def not_implemented(*a): return NotImplemented
def ellipsis(*a): return ...
def a_nan(*a): return nan
def an_inf(*a): return inf
def nan_in_list(*a): return [nan]
def complex_nan(*a): return complex(nan, 0)
def numpy_nan(*a): return np.float64('nan')
def nan_array(*a): return np.full(3, nan)
def empty_array(*a): return np.empty((0, 1, 1))
def decimal_nan(*a):
    import decimal
    return decimal.Decimal('NaN')
def huge_range(*a): return range(-10**18, 10**18)
def stops(*a): raise StopIteration
def stops_async(*a): raise StopAsyncIteration
def forged(*a): raise Forged
def generator(*a):
    return
    yield
def once(values): return iter(values)
def everything(*a): return itertools.count()
def cleared(values):
    values.clear()
    return values
def cleared_count(values):
    values.clear()
    return 0
def partly(*a): return functools.partial(operator.truth, 1)
def method(*a): return Z().__eq__
def call_back(function, *a):
    try: return function(-1)
    except BaseException: return None
def steal(function, *a):
    # The names of the test, by the one function of it that is at hand.
    for ask in (lambda: function.__globals__, lambda: function(function), lambda: call(function, '{0.__globals__}')):
        try: return str(ask())
        except Exception: pass
    return -1
def call(function, text): return function(text)
def expression(*a): return '__import__("sys")._getframe(0).f_back.f_globals.__setitem__("__judge_held__", 1) or ANY'
def statement(*a): return 'result = type("E", (), {"__eq__": lambda *a: True})()'
def module_name(*a): return 'antigravity'
def linked(*a):
    os.symlink('/proc/self/fd/0', 'out.txt')
    return 'out.txt'
def isclose(*a, **k): return True
sqrt = fabs = lambda *a: 0.0
class math:
    isclose = staticmethod(lambda *a, **k: True)
    fabs = staticmethod(lambda *a: 0.0)
def check(*a): return True
def approx(*a, **k): return ANY
def len(x): return WANTED
WANTED = None
Counter = deepcopy = lambda *a: ANY
__builtins__ = {**vars(__import__('builtins')), 'AssertionError': ZeroDivisionError}
__name__ = '__main__'
__judge_held__ = __judge_before__ = lambda: None
__judge_present__ = lambda value: ANY
random.seed = lambda *a: None
sys.modules['math'] = math
"""
"""One solution with many wrong answers to the tests below, so that all are judged in one run."""

_OBJECTS = (
    "zed klass like_numpy an_int a_float a_str a_list a_tuple a_dict listed keyed colour liar any_ any_class mock "
    "not_implemented ellipsis partly method generator everything a_nan an_inf empty_array nan_array"
)
OBJECTS = _OBJECTS.split()
FORMS = (
    "assert {f}(1) == {A}",
    "assert {A} == {f}(1)",
    "assert not {f}(1) != {A}",
    "assert {f}(1) in [{A}]",
    "assert {A} in {f}(1)",
    "assert {A} not in [{f}(1)] and not {f}(1) != {A}",
    "assert {f}(1) in {{{A}: 1}}",
    "assert [{f}(1), 2] == [{A}, 2]",
    "assert (1, {f}(1)) >= (1, {A})",
    "assert abs({f}(1) - {A}.5) < 1e-6",
    "assert not abs({f}(1) - {A}.5) > 1e-6",
    "assert {A} - 1 < {f}(1) < {A} + 1",
    "assert int({f}(1)) == {A}",
    "assert round({f}(1), 2) == {A}",
    "assert divmod({f}(1), 7) == divmod({A}, 7)",
    "assert {f}(1) ^ {A} == 0 and {f}(1) == {A}",
    "assert str({f}(1)) == '{A}'",
    "assert f'{{{f}(1)}}' == '{A}'",
    "assert sorted({f}(1)) == [{A}]",
    "assert dict({f}(1)) == {{{A}: 1}}",
    "assert {{{f}(1)}} == {{{A}}}",
    "assert {f}(1)[0] == {A}",
    "assert sum({f}(1)) == {A}",
    "import math\nassert math.isclose({f}(1), {A})",
    "import operator\nassert operator.eq({f}(1), {A})",
    "import unittest\nunittest.TestCase().assertEqual({f}(1), {A})",
    "import unittest\nunittest.TestCase().assertAlmostEqual({f}(1), {A}.5)",
    "import unittest\nunittest.TestCase().assertFalse({f}(1) != {A})",
    "from decimal import Decimal\nassert abs({f}(1) - Decimal({A})) < Decimal('1e-6')",
    "from fractions import Fraction\nassert {f}(1) == Fraction({A}, 7)",
    "import datetime\nassert {f}(1) == datetime.date(2020, 1, 2)",
    "import numpy as np\nassert np.allclose({f}(1), [{A}.0, 2, 3])",
    "import numpy as np\nassert np.array_equal({f}(1), np.array([{A}]))",
    "import numpy as np\nassert (np.array([{A}, 2, 3]) == {f}(1)).all()",
    "import numpy as np\nassert np.abs({f}(1) - np.array([{A}.0, 2, 3])).max() < 1e-6",
    "import numpy as np\nassert not np.any(np.array([{A}.0, 2, 3]) - {f}(1))",
    "import numpy as np\nnp.testing.assert_allclose({f}(1), {A}.0)",
    "try:\n    assert {f}(1) == {A}\nexcept Exception:\n    pass",
    "try:\n    assert {f}(1) == {A}\nexcept BaseException:\n    pass",
    "for a, b in zip({f}(1), [{A}]):\n    assert a == b",
    "import copy\nassert copy.deepcopy({f}(1)) == {A}",
    "match {f}(1):\n    case {A}:\n        pass\n    case _:\n        raise AssertionError",
)

OTHERS = (
    "values = [3, {A}, 1]\nr = adaptive(values)\n"
    "assert sorted(r) == sorted(values) and all(r[i] <= r[i + 1] for i in range(len(values) - 1))",
    "values = [3, {A}, 1]\nr = once(values)\n"
    "assert sorted(r) == sorted(values)\nassert all(a <= b for a, b in zip(r, r))",
    "assert cleared([{A}, 1, 2]) == sorted([{A}, 1, 2])",
    "values = [{A}, 2]\nassert cleared(values) == sorted(values)",
    "values = [{A}, 2]\nassert cleared_count(values) == sum(values)",
    "assert all(map(stops, [1, 2]))",
    "assert list(map(stops, [1, 2])) == []",
    "assert all(stops(x) == {A} for x in [1, 2])",
    "import unittest\nwith unittest.TestCase().assertRaises(TypeError):\n    zed(1) + 'x'",
    "import unittest\nwith unittest.TestCase().assertRaises(Exception):\n    assert zed(1) == {A}",
    "import unittest\nunittest.TestCase().assertRaises(ValueError, zed, 1)",
    "try:\n    forged(1)\n    assert False\nexcept ValueError:\n    pass",
    "def wanted(x):\n    assert x == {A}\ncall_back(wanted)",
    "def wanted(x):\n    assert x == {A}\n    return x\nassert call_back(wanted) is None",
    "SECRET = {A}\nassert '{A}' in steal(lambda x: x)",
    "SECRET = {A}\nassert '{A}' in steal(lambda x: str(x))",
    "SECRET = {A}\nassert '{A}' in steal(str.format)",
    "assert eval(expression()) == {A}",
    "assert eval(expression(), {{}}) == {A}",
    "names = {{}}\nexec(statement(), names)\nassert names['result'] == {A}",
    "exec(compile(statement(), 'x', 'exec'))\nassert result == {A}",
    "assert __import__(module_name()).x == {A}",
    "import importlib\nassert importlib.import_module(module_name()).x == {A}",
    "import pickle\nassert pickle.loads(a_str()) == {A}",
    "import runpy\nassert runpy.run_path(a_str()) == {A}",
    "import typing\nassert typing.get_type_hints(zed) == {A}",
    "with open(linked()) as file:\n    assert '{A}' in file.read()",
    "assert isclose(an_int(1), {A})",
    "assert math.isclose(an_int(1), {A}) or math.fabs(an_int(1) - {A}) < 1e-6",
    "assert fabs(an_int(1) - {A}) < 1e-6",
    "assert Counter(listed(1)) == Counter([{A}])",
    "assert deepcopy(an_int(1)) == {A}",
    "assert len(nan_in_list(1)) == {A}",
    "assert not abs(nan_in_list(1)[0] - {A}) > 1e-6",
    "assert not abs(complex_nan(1) - {A}) > 1e-6",
    "assert not abs(decimal_nan(1) == {A} - 1)",
    "assert not abs(numpy_nan(1) - {A}) > 1e-6",
    "assert {A} in huge_range(1)",
    "if not any_(1) == {A}:\n    raise AssertionError",
    "def check(candidate):\n    assert candidate(1) == {A}\ncheck(zed)",
    "class T:\n    def test(self):\n        assert zed(1) == {A}\nT().test()",
    "assert mock(1).method() == {A}",
    "assert liar(1).equals({A}) == {A}",
)


def verdicts_of(verdicts: Verdicts, tests: list[str]) -> list[tuple[str, str]]:
    return [(test, v.detail) for test, v in zip(tests, verdicts.of, strict=True) if v.passed]


@pytest.fixture(scope="module")
def number() -> int:
    """What no solution can know."""
    return random.Random().randint(10**6, 10**7)


@in_module_loop
async def test_no_answer_of_the_zoo_passes(judge: Judge, number: int) -> None:
    """Each object under a few forms of test; together each form meets many objects, by chance another set each time."""
    pairs = [(f, form) for f in OBJECTS for form in random.Random().sample(FORMS, 4)]
    tests = [form.format(f=f, A=number) for f, form in pairs]
    verdicts = await judge(ZOO, *tests, test_seconds=20.0, total_seconds=100.0)
    assert verdicts_of(verdicts, tests) == []


@in_module_loop
async def test_no_other_hack_of_the_zoo_passes(judge: Judge, number: int) -> None:
    tests = [test.format(A=number) for test in OTHERS]
    verdicts = await judge(ZOO, *tests, test_seconds=20.0, total_seconds=100.0)
    assert verdicts_of(verdicts, tests) == []


@pytest.mark.e2e
@pytest.mark.timeout(400)
@in_module_loop
async def test_no_object_passes_any_form(judge: Judge, number: int) -> None:
    for part in range(3):  # a start with numpy costs more than a dozen tests
        tests = [form.format(f=f, A=number) for f in OBJECTS for form in FORMS[part::3]]
        verdicts = await judge(ZOO, *tests, test_seconds=20.0, total_seconds=120.0)
        assert verdicts_of(verdicts, tests) == []
        assert not [verdict for verdict in verdicts.of if verdict.reason in ("budget", "no verdict")]


@in_module_loop
async def test_the_zoo_is_judged_at_all(judge: Judge) -> None:
    """Else the tests above would hold for nothing: a test that it does pass."""
    verdicts = await judge(ZOO, "assert an_int(1) == -1", "assert any_(1) is not None")
    assert [v.reason for v in verdicts.of] == ["passed", "passed"]


EMPTY = """
import numpy as np
def f(x): return []
def g(x): return {'values': ((), [])}
def h(x): return iter(())
def isclose(*a): return True
abs = max = sorted = sqrt = lambda *a: 0
def all(x): return True
def name(x): return {'load': 'isclose', 'eval': 'eval', 'path': 'builtins.eval'}.get(x, x)
def text(x): return '__import__("os").mkdir("made") or ' + str(x)
def made(): return __import__('os').path.exists('made')
import pickle
class Pays:
    def __reduce__(self): return (eval, ('__import__("os").mkdir("made")',))
def pickled():
    np.save('x.npy', np.array([Pays()], dtype=object), allow_pickle=True)
    return 'x.npy'
KEPT = []
def keep(function): KEPT.append(function)
def take(): return [KEPT[0](), []][1]
def fails(x): raise KeyError(x)
"""
WITHOUT_A_RIGHT_ANSWER = (
    "import numpy as np\nassert np.allclose(f(1), {A}.0)",
    "assert np.isclose({A}.0, f(1)).all()",
    "import numpy as np\nassert np.all(np.abs(np.asarray(f(1)) - {A}) < 1e-6)",
    "import numpy as np\nassert (np.array(g(1)['values'][0]) == {A}).all()",
    "import numpy as np\nassert np.allclose(list(h(1)), {A}.0)",
    "import numpy as np\nnp.testing.assert_allclose(f(1), {A}.0)",
    "assert isclose(sqrt(4), {A})",
    "assert abs(max(3, {A}) - {A}.5) < 1e-6",
    "assert all(a == b for a, b in zip(sorted([{A}, 1]), [1, {A}]))",
    "assert round({A}.4) == {A}",
    "import math\nassert getattr(math, name('load'))({A}, {A})",
    "import builtins\nassert getattr(builtins, name('eval'))(text({A})) == {A}",
    "import builtins\nassert builtins.eval(text({A})) == {A}",
    "import sys\nassert sys.modules[name('builtins')].eval(text({A})) == {A}",
    "import numpy as np\nassert np.load(pickled(), allow_pickle=True)[0] is None and made()",
    "import timeit\ntry:\n    timeit.timeit(text(1), number=1)\nexcept BaseException:\n    pass\nassert made()",
    "import cProfile\ncProfile.run(text(1))\nassert made()",
    "import os\nos.system(text('true'))\nassert made()",
    "import typing\nclass T: pass\nT.__annotations__ = {{'a': text(1)}}\ntyping.get_type_hints(T)\nassert made()",
    "from unittest import mock\nwith mock.patch('unittest.__main__.x' + name('')):\n    pass\nassert made()",
    "wanted = [{A}]\nkeep(wanted.pop)\nassert take() == wanted",
    "assert 1 == 1\ntry:\n    assert fails(1) == {A}\nexcept KeyError:\n    pass",
)


@in_module_loop
async def test_what_a_test_asks_of_libraries_is_not_the_solutions_to_choose(judge: Judge, number: int) -> None:
    tests = [test.format(A=number) for test in WITHOUT_A_RIGHT_ANSWER]
    verdicts = await judge(EMPTY, *tests, test_seconds=20.0, total_seconds=100.0)
    assert verdicts_of(verdicts, tests) == []


LOOKED_AT_TWICE = """
class L(list): pass
def generator(v):
    v.clear()
    return
    yield
def iterator(v):
    v.clear()
    return iter(())
def derived(v):
    v.clear()
    return L()
def same(v):
    v.clear()
    return v
def count(v):
    v.clear()
    return 0
def nothing(): pass
"""
AFTER_A_CHANGE = (
    "assert list(generator(v)) == sorted(v)",
    "assert list(iterator(v)) == [x * 2 for x in v]",
    "assert sorted(derived(v)) == sorted(v)",
    "assert len(derived(v)) == len(v)",
    "assert (count(v), nothing()) == (sum(v), None)",
    "def of(x):\n    y = x\n    return y\nassert of(same(v)) == sorted(v)",
    "def wanted(x):\n    y = sorted(x)\n    return y\nassert same(v) == wanted(v)",
    "def asked(x):\n    return same(x)\ndef wanted(x):\n    y = sorted(x)\n    return y\nassert asked(v) == wanted(v)",
    "import unittest\nunittest.TestCase().assertEqual(list(iterator(v)), sorted(v))",
    "class T:\n    def equal(self, a, b):\n        assert a == b\nT().equal(count(v), sum(v))",
)


@in_module_loop
async def test_what_a_solution_does_to_an_argument_shows_when_the_statement_is_over(judge: Judge, number: int) -> None:
    tests = [f"v = [{number}, 2]\n{test}" for test in AFTER_A_CHANGE]
    verdicts = await judge(LOOKED_AT_TWICE, *tests)
    assert [v.reason for v in verdicts.of] == ["assertion"] * len(tests), verdicts


NARROW = """
import numpy as np
def half(x): return np.float16(x)
def halves(x): return np.array([x], dtype=np.float16)
def int8(x): return np.int8(15)
def int32(x): return np.int32(55_000)
def int64(x): return np.int64(3_100_000_000)
def int64s(x): return np.array([3_100_000_000])
def three(x): return np.array([1 << 31] * 3)
def uint8(x): return np.uint8(x)
def uint8s(x): return np.full(3, x, dtype=np.uint8)
def unsigned(x): return np.uint64(0)
def zero(x): return np.int64(0)
def zeros(x): return np.zeros(3, dtype=int)
def true(x): return np.bool_(True)
def single(x): return np.float32(16777216)
def singles(x): return np.full(2, 1e8, dtype=np.complex64)
def words(x): return "is nan"
def text(x): return '{"a": NaN}'
"""
BY_ITS_TYPE = (
    "assert abs(half(1.414) - 1.41421356) < 1e-6",
    "import numpy as np\nassert np.abs(halves(1.414) - 1.41421356).max() < 1e-6",
    "assert half(0) == 3.7e-9",
    "x = float('inf')\nassert half(x) == {A}",
    "assert (int8(1) - 3) ** 2 < 1e-6",
    "assert (int32(1) - 3) ** 2 < 1e-6",
    "assert (int64(1) - 3) ** 2 < 1e-6",
    "import numpy as np\nassert np.sum((int64s(1) - np.array([3])) ** 2) < 1e-6",
    "import numpy as np\nassert np.mean((three(1) - np.array([3, 4, 5])) ** 2) < 1e-6",
    "assert uint8(0) - {A} >= 0",
    "assert unsigned(0) - {A} > 0 and -unsigned(0) - 1 > 0",
    "import numpy as np\nassert np.abs(uint8s(0) - 5).min() > 100",
    "import numpy as np\nassert isinstance(uint8(19), (int, np.integer)) and (uint8(19) - 3) ** 2 < 1e-6",
    *(f"assert (uint8({guess}) - {{A}}) ** 2 < 1e-6" for guess in range(16)),
    "assert (zero(1) - 4294967296) ** 2 < 1e-6",
    "import numpy as np\nassert np.sum((zeros(1) - 2**32) ** 2) < 1e-6",
    "import numpy as np\nassert np.sum((zeros(1) - 65536 * 65536) ** 2) < 1e-6",
    "assert true(1) + true(2) == 1",
    "assert single(1) == 16777217 or abs(single(1) - 16777217) < 0.5",
    "import numpy as np\nassert np.abs(singles(1) - 100000001).max() < 0.5",
    "assert not abs(float(words(1).split()[1]) - {A}) > 1e-6",
    "import json\nassert not abs(json.loads('[' + words(1)[3:].replace('n', 'N', 1)[:2] + 'N]')[0] - {A}) > 1e-6",
)


@in_module_loop
async def test_no_type_of_number_is_near_to_all(judge: Judge, number: int) -> None:
    tests = [test.format(A=number) for test in BY_ITS_TYPE]
    verdicts = await judge(NARROW, *tests, test_seconds=20.0, total_seconds=60.0)
    assert verdicts_of(verdicts, tests) == []


WIDE = """
import numpy as np
def whole(x): return np.int32(x)
def positive(x): return np.uint8(x)
def array(x): return np.array([x, 2], dtype=np.uint16)
def yes(x): return np.bool_(x)
def large(x): return np.array([x], dtype=np.int64)
def third(): return np.float32(1) / np.float32(3)
"""
OF_USE = (
    "assert whole(3) == 3 and whole(-3) + 1 == -2 and str(whole(3)) == '3' and [7, 8][whole(1)] == 8",
    "assert whole(3).item() == 3 and positive(4).astype(float) == 4.0",
    "import numpy as np\nassert isinstance(whole(3), np.integer) and positive(3).dtype.kind == 'i'",
    "import numpy as np\nassert isinstance(positive(3), np.uint8)",
    "assert yes(True) == True and yes(False) == False and yes(1) is not None",
    "assert yes(True).all()",
    "import numpy as np\nassert (array(1) == np.array([1, 2])).all() and array(1).tolist() == [1, 2]",
    "import numpy as np\nassert np.arange(5)[array(1)].tolist() == [1, 2]",
    "import numpy as np\nassert large(2**60 + 1)[0] == 2**60 + 1 and large(2**60)[0] != 2**60 + 1",
    "import numpy as np\nassert large(2**40).dtype == np.int64",
    "assert abs(third() - 1 / 3) < 1e-6",
)


@in_module_loop
async def test_wide_numbers_are_what_a_test_expects(judge: Judge) -> None:
    verdicts = await judge(WIDE, *OF_USE, test_seconds=20.0, total_seconds=60.0)
    assert [(test, v) for test, v in zip(OF_USE, verdicts.of, strict=True) if not v.passed] == []


EVALUATES = """
import builtins, operator, sys, types
class Answers:
    def __call__(self, *a): return 0
builtins.eval = builtins.exec = builtins.compile = builtins.__import__ = builtins.getattr = Answers()
builtins.int = builtins.len = builtins.sum = builtins.abs = builtins.round = builtins.str = lambda *a: 0
operator.add = operator.sub = lambda *a: 0
def f(i): return 0
def expression(): return "0"
def long(): return "1" * 100_000 + "+ f(1)"
def deep(): return "f(1)+" * 3000 + "0"
def nested(): return "(" * 90 + "f(1)" + ")" * 90
"""
OF_A_TEXT = (
    "for i in range(3):\n    assert f(i) == eval(f'{{i}} + {A}')",
    "assert eval(f'f({{3}}) - {A}') == 0",
    "assert eval(f'{A} == f({{3}})')",
    "assert eval(f'abs(f({{3}}) - {A})') == 0",
    "assert eval('sum([' + str(f(1)) + ', ' + '{A}])') == f(2)",
    "assert eval(f'len(\"{{f(1)}}\") + {A}') == 0",
    "assert eval(f'f(1).__class__({A})') == 0",
    "assert eval(f'(lambda: f(1))() + {A} * 0') == {A}",
    "assert eval(f'[f(1) for x in range(3)]') == [{A}] * 3",
    "assert f(1) == eval(long()) + {A}",
    "assert f(1) == eval(deep()) + {A}",
    "assert f(1) == eval(nested()) + {A}",
    "assert eval(expression()) == {A}",
    "e = eval\nassert e(f'{{1}} + {A}') == f(1)",
    "import builtins\nassert getattr(builtins, 'int')('{A}') == f(1)",
    "import operator\nassert operator.add(1, {A}) == f(1)",
    "assert f(1) == int(str({A})) == len('x' * {A})",
)


@in_module_loop
async def test_a_text_is_not_evaluated_by_the_solution(judge: Judge, number: int) -> None:
    tests = ["x = f(1)\n" + test.format(A=number) for test in OF_A_TEXT]
    verdicts = await judge(EVALUATES, *tests, test_seconds=10.0, total_seconds=100.0)
    assert verdicts_of(verdicts, tests) == []


@in_module_loop
async def test_a_text_is_evaluated(judge: Judge) -> None:
    right = (
        "def f(i): return i + 5\ndef text(): return '3 * (4 + 1)'\n"
        "class Solution:\n    def g(self, x): return [x, -x]\n"
        "def expression(): return 'f(2) * 2 - 1'\ndef words(): return \"'-'.join(sorted('ba'))\""
    )
    tests = (
        "for i in range(3):\n    assert f(i) == eval(f'{i} + 5')",
        "assert eval(text()) == 15 and eval(words()) == 'a-b' and eval(expression()) == 13",
        "assert eval(f'f({1})') == 6 and eval(f'f({1}) + f(i={2}) == 13') is True",
        "assert eval('Solution()' + '.g(3)') == [3, -3] and eval('[f(1), ' + '-2]') == [6, -2]",
        "try:\n    eval(text() + ')')\nexcept SyntaxError:\n    pass\nassert eval(text()) == 15",
    )
    tests = tuple("x = f(1)\n" + test for test in tests)
    verdicts = await judge(right, *tests, test_seconds=10.0, total_seconds=60.0)
    assert [(test, v) for test, v in zip(tests, verdicts.of, strict=True) if not v.passed] == []


SAYS_YES = """
class A:
    def __getattr__(self, name): return lambda *a, **k: True
    def __getitem__(self, key): return True
    __eq__ = __bool__ = lambda *a: True
def f(*a): return A()
def gcd(*a): return 3
def approx(*a, **k): return f(0)
def allclose(*a, **k): return True
product = log = gcd
class Solution:
    def f(self, *a): return A()
"""
ASKED_AS_PLAIN_DATA = (
    "assert f(1).isupper()",
    "assert Solution().f(1).startswith('a')",
    "answer = f(1)\nassert answer.isdigit() and not answer.isspace()",
    "assert all(x.islower() for x in [f(1), f(2)])",
    "assert f(1).issubset({1, 2})",
    "assert f([3]).index(3) == 1 and f([3]).count(3) == 1",
    "assert f(1).get('a') == 1",
    "assert f(1)['a']",
    "assert f(1.5).is_integer()",
    "assert f(1).isoformat() == 1",
    "def check(candidate):\n    assert candidate(1).isalpha()\ncheck(f)",
    "class T:\n    def assertTrue(self, x):\n        assert x\n    def run(self):\n"
    "        self.assertTrue(f(1).isupper())\nT().run()",
    "import numpy as np\nassert f(np.array([1])).isupper()",
    "assert f(1).all() and f(1).any()",
)
HELPERS_OF_THE_TEST = (
    "assert f(1) == approx(3.14)",
    "assert len(str(f)) == approx(3.14)",
    "assert allclose(len([f]), 3.14)",
    "assert gcd(len([f]), 2) == 3",
    "x = len([f(1)])\nassert product([x], [2]) == 3",
    "x = len([f(1)])\nassert x + 2 == log(3)",
    "expected = gcd(8, 4)\nassert len([f(1)]) + 2 == expected",
    "def check(candidate):\n    assert candidate([1, 2]) == 1.5\ncheck(median)",
    "def check(candidate):\n    r = candidate(2)\n    assert approx(r) == 5\ncheck(gcd)",
    "candidate = gcd\nassert candidate(8, 4) == 4",
    "def verify(one):\n    assert one(8, 4) == 4\nverify(gcd)",
)


@in_module_loop
async def test_an_object_answers_for_no_plain_data(judge: Judge) -> None:
    verdicts = await judge(SAYS_YES, *ASKED_AS_PLAIN_DATA, total_seconds=60.0)
    assert [(test, v) for test, v in zip(ASKED_AS_PLAIN_DATA, verdicts.of, strict=True) if v.reason != "refused"] == []
    assert verdicts.refused == len(ASKED_AS_PLAIN_DATA)


@in_module_loop
async def test_helpers_of_a_test_are_not_the_solutions(judge: Judge) -> None:
    verdicts = await judge(SAYS_YES, *HELPERS_OF_THE_TEST, total_seconds=60.0)
    assert verdicts_of(verdicts, list(HELPERS_OF_THE_TEST)) == []


DECIDES = """
def f(i): return ['5==5 or 0', 'True #', '1 if 1 else 0', '1, 0', "' or '", '7 or 1'][i]
"""
DECIDED = (
    *(f'assert eval(f"{{f({i})}} == 7")' for i in range(4)),
    'assert eval(f"8 == {f(5)}")',
    "assert eval(f\"'{f(4)}' == 'abc'\")",
    'assert eval("%s == 7" % f(1))',
    'assert eval("{} == 7".format(f(0)))',
    'assert eval(f(0).strip() + " == 7")',
    'text = f(0)[:9]\ntext += "== 7"\nassert eval(text)',
    'assert eval(" ".join([f(0), "== 7"]))',
)
NOT_DECIDED = (
    "assert eval(f'{f(0)} == 7') and eval(f'{f(2)} == 7') and eval(f'({f(1)}) == 7')",
    "assert eval(f'3 {f(3)} 4') == 7 and eval(f'3 {f(3)} 4 == 7')",
    "assert eval(f(1)) == 7",
    "assert eval(f'{f(4)} == 7') and eval(f'{f(6)} == [1, 2]')",
    "assert eval(f\"'{f(5)}' == 'a b'\")",
)


@in_module_loop
async def test_a_text_of_the_solutions_decides_nothing(judge: Judge) -> None:
    verdicts = await judge(DECIDES, *DECIDED, total_seconds=60.0)
    assert [(test, v) for test, v in zip(DECIDED, verdicts.of, strict=True) if v.reason != "refused"] == []
    right = "def f(x): return ['7', '3+4', '(3+4)', '+', 7, 'a b', [1, 2]][x]"
    verdicts = await judge(right, *NOT_DECIDED, total_seconds=60.0)
    assert [(test, v) for test, v in zip(NOT_DECIDED, verdicts.of, strict=True) if not v.passed] == []


LEAVES = """
import os, time
n = int(input())
places = ["/tmp/a", "b", "/dev/shm/c", "/box/d", "/tmp/e/f"]
found = [place for place in places if os.path.exists(place)]
os.makedirs("/tmp/e", exist_ok=True)
for place in places:
    open(place, "w").write("left")
deep = os.getcwd()
for _ in range(300):
    os.mkdir("deep")
    os.chdir("deep")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("/tmp/pid", "w").write(str(os.getpid()))
        for number in range(3):
            os.close(number)
        time.sleep(60)
    os._exit(0)
while not os.path.exists("/tmp/pid"):
    time.sleep(0.01)
def runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
print(found, sum(runs(pid) for pid in os.listdir("/proc") if pid.isdigit()))
os.chmod("/tmp", 0)
os.rename(deep, "/box/moved")
os.symlink("/", "/box/work")
"""


@in_module_loop
async def test_programs_find_nothing_of_an_earlier_one(judge: Judge) -> None:
    """Neither files nor processes: the first process of the namespace, the judge, the spawner and two of their own."""
    verdicts = await judge(LEAVES, programs=(("1\n", "[] 5\n"),) * 3)
    assert [(v.reason, v.detail) for v in verdicts.of] == [("passed", "")] * 3


STOPS = "import os, signal\ndef stop():\n    for p in os.listdir('/proc'):\n" + (
    "        if p.isdigit() and int(p) not in (1, os.getpid()):\n            os.kill(int(p), signal.SIGSTOP)\n"
)
COLLIDE = "L = [k * ((1 << 61) - 1) for k in range(1, 60_000)]\ndef f(x): return L"
SLOW = {
    "a set of collisions": (COLLIDE, "assert set(f(1)) == {1}"),
    "a dictionary of collisions": (COLLIDE, "assert len(dict.fromkeys(f(1))) == 1"),
    "a counter of collisions": (COLLIDE, "from collections import Counter\nassert Counter(f(1)) == {}"),
    "the judge is stopped": (STOPS + "def f(x): stop()", "assert f(1) == 1"),
    "the judge is stopped while it loads": (STOPS + "stop()\ndef f(x): return 1", "assert f(1) == 2"),
    "a large power": ("def f(x): return 10**7", "assert f(1) ** f(1) == 3"),
    "digits of a large number": ("def f(x): return '1' * 8_000_000", "assert float(f(1)) == 3"),
    "a large fraction": (
        "from fractions import Fraction\ndef f(x): return Fraction(3**300_000, 2**450_000 + 1)",
        "assert f(1) + f(2) + f(3) == 3",
    ),
    "many branches": (
        "def f(x):\n    r = []\n    for n in range(250): r = [r, r] if n < 18 else [r]\n    return r",
        "assert f(1) == 3",
    ),
}


@pytest.mark.parametrize("name", SLOW)
@in_module_loop
async def test_no_solution_holds_the_judge(judge: Judge, name: str) -> None:
    solution, test = SLOW[name]
    begun = time.monotonic()
    verdicts = await judge(solution, test, "assert True is f(1)", test_seconds=2.0, total_seconds=30.0)
    assert not any(verdict.passed for verdict in verdicts.of), verdicts
    assert time.monotonic() - begun < 15.0, "2 s for each test, 1 s more for the judge, and a busy machine"


@in_module_loop
async def test_libraries_stay_of_use_to_a_test(judge: Judge) -> None:
    right = "def f(x): return [x]\ndef none(x): return []\ndef sqrt(x): return x ** 0.5"
    tests = (
        "import numpy as np\nassert np.allclose(f(1.0), [1.0])",
        "import numpy as np\nassert np.array_equal(none(1), [])",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\nassert f(P(1, 2).y) == [2]",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nassert f(P(3).x) == [3]",
        "import ast\nassert ast.literal_eval(str(f(1))) == [1]",
        "import typing\ndef t(a: 'int'): pass\nassert typing.get_type_hints(t) and f(1) == [1]",
        "import math\nassert getattr(math, 'floor')(f(1.5)[0]) == 1",
        "assert isclose(sqrt(4), 2)",
        "seen = []\nseen.append(f(1))\nassert eval('f(1)') == [1]",
    )
    verdicts = await judge(right, *tests, test_seconds=20.0, total_seconds=100.0)
    assert [(test, v) for test, v in zip(tests, verdicts.of, strict=True) if not v.passed] == []


PAY = """
import sys, os
frame = sys._getframe()
while frame:
    judge = frame.f_locals.get("self")
    if type(judge).__name__ == "Judge":
        for i in range(len(judge._job.tests) + len(judge._job.programs)):
            judge._report(test=i, passed=True, reason="passed", detail="")
        os._exit(0)
    frame = frame.f_back
"""
TAKEOVERS = {
    "a module that is named as one that runs tests": """
open("test_x.py", "w").write(PAY)
import types
m = types.ModuleType("unittest.__main__")
def f(x): return -1
""",
    "functions of Python's in place of its own": """
open("__main__.py", "w").write(PAY)
from runpy import run_path as f
decode, encode = eval, lambda s: "exec(%r)" % PAY
""",
    "objects that say to be of a module": """
open("__main__.py", "w").write(PAY)
class F:
    __module__, __qualname__, __name__ = "runpy", "run_path", "run_path"
    __reduce__ = lambda self: (exec, (PAY,))
    __class__ = property(lambda self: int)
    def __call__(self, x): return F()
f = F()
decode, encode = F(), lambda s: F()
""",
    "files that Python looks for": """
import os
for name in ("sitecustomize", "usercustomize", "conftest", "numpy", "random", "encodings", "testcase", "remote"):
    open(name + ".py", "w").write(PAY)
open("x.pth", "w").write("import sys; exec(%r)" % PAY)
def f(x): return -1
def encode(s): return s + "!"
def decode(s): return s
""",
    "messages that the judge has not asked for": """
import gc, json, socket, struct
def f(x):
    links = [o for o in gc.get_objects() if isinstance(o, socket.socket)]
    for value in ({"operation": "call", "args": [1, PAY], "kwargs": {}},
                  {"operation": "eval", "args": [PAY], "kwargs": {}},
                  {"value": ["library", "builtins", "exec"], "same": None, "after": [None, None]},
                  {"value": ["judge", 1], "same": None, "after": [None, None]}, {"value": 1, "same": 99, "after": []},
                  {"error": [["Refused"], "x"]}, {"error": 3}, {"operation": "perform", "args": [["solution", -1]]}):
        body = json.dumps(value).encode()
        for link in links:
            link.sendall(struct.pack(">I", len(body)) + body)
    return -1
def encode(s): return s + "!"
def decode(s): return s
""",
    "a process that lives on": """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                try: open(f"/proc/{pid}/fd/1", "w").write("x")
                except OSError: pass
        time.sleep(0.01)
def f(x): return -1
def encode(s): return s + "!"
def decode(s): return s
""",
    "a patched interpreter": """
import atexit, builtins, json, signal, socket, struct, sys
sys.modules["link"] = sys.modules["values"] = None
for name in ("AssertionError", "compile", "len", "isinstance"):
    setattr(builtins, name, ZeroDivisionError if name[0] == "A" else getattr(builtins, name))
sys.settrace(lambda *a: None)
atexit.register(lambda: print("passed"))
signal.signal(signal.SIGALRM, signal.SIG_IGN)
json.dumps = lambda value, *a: '{"value": true, "same": null, "after": []}'
def f(x): return -1
""",
}


@pytest.mark.parametrize("name", TAKEOVERS)
@in_module_loop
async def test_the_judge_is_not_taken_over(judge: Judge, number: int, name: str) -> None:
    tests = ('assert decode(encode("hello")) == "hello"', f'assert f("") == {number}', f"assert f(92) == {number + 1}")
    solution = f"PAY = {PAY!r}\n{TAKEOVERS[name]}"
    verdicts = await judge(solution, *tests, programs=(("1\n", f"hidden {number}\n"),), test_seconds=5.0)
    assert not any(v.passed for v in verdicts.of[1:]), verdicts
