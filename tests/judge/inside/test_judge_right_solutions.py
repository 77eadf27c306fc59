"""Right solutions of ordinary kinds, under tests as people write them: the judge's caution must cost none of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from verl_tool.judge.code_tests import Verdicts

pytestmark = pytest.mark.slow

Judge = Callable[..., Awaitable[Verdicts]]
in_module_loop = pytest.mark.asyncio(loop_scope="module")

ITERATORS = """
def first_two(it): return [next(it), next(it)]
def total(it): return sum(it)
def squares(n):
    for i in range(n): yield i * i
def keys(d): return d.keys()
def values(d): return d.values()
def items(d): return d.items()
def each(f, xs): return [f(x) for x in xs]
"""
NUMPY = """
import numpy as np
def twice(x): return np.array(x) * 2
def mean(x): return np.mean(x)
def nothing(x): return None
def typed(x, kind): return np.array(x).astype(kind)
"""
EFFECTS = """
import datetime
def hello(x): print('hello', x); return x
def order(values): values.sort()
def put(values, x, place=None): values.append(x); return len(values)
def take(values): return values.pop(0)
def day(s): return datetime.datetime.strptime(s, '%Y-%m-%d')
class Box:
    def __init__(self): self.of = {}
    def __getitem__(self, key): return self.of[key]
    def __setitem__(self, key, value): self.of[key] = value
    def __delitem__(self, key): del self.of[key]
"""
RAISES = """
import sys
class Coded(ValueError):
    def __init__(self, code): super().__init__(f'code {code}'); self.code = code
def coded(x): raise Coded(x)
def key(x): return {}[x]
def leave(x): sys.exit(x)
def decode(x): return x.decode()
def strange(x): raise ValueError(object())
"""
GLOBALS = """
table = list(range(3_000_000))
loop = []
loop.append(loop)
words = ['x' * 1000] * 5000
def f(x): return table[x]
LIMIT = 7
"""
RIGHT = {
    ITERATORS: (
        "assert first_two(iter([1, 2, 3])) == [1, 2]",
        "import itertools\nassert first_two(itertools.count(5)) == [5, 6]",
        "def own():\n    yield 1\n    yield 2\nassert first_two(own()) == [1, 2]",
        "assert first_two(reversed([1, 2])) == [2, 1]",
        "assert total({'a': 3}.values()) == 3 and total(x for x in [1, 2]) == 3",
        "class Two:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n"
        "        if self.n > 2: raise StopIteration\n        return self.n\nassert total(Two()) == 3",
        "import types\nassert isinstance(squares(3), types.GeneratorType) and list(squares(3)) == [0, 1, 4]",
        "import inspect\nassert inspect.isgenerator(squares(1))",
        "assert keys({'a': 1}) == {'a'} and 'a' in keys({'a': 1})",
        "assert list(values({'a': 1})) == [1] and dict(items({'a': 1})) == {'a': 1}",
        "from functools import lru_cache\n@lru_cache\ndef up(x): return x + 1\nassert each(up, [1]) == [2]",
    ),
    NUMPY: (
        "import numpy as np\nassert twice([1.5]).sum() == 3.0 and (twice([1]) == np.array([2])).all()",
        "assert twice([1, 2]).mean() == 3 and twice([1, 2]).tolist() == [2, 4]",
        "import numpy as np\nassert np.array_equal(twice([]), np.array([]))",
        "import numpy as np\nassert twice(np.array([])).size == 0 and len(twice([])) == len([])",
        "import numpy as np\nassert nothing(np.array([1])) is None",
        "import numpy as np\nvalues = [1.0]\nnothing(values)\nassert np.allclose(values, [1.0])",
        "import numpy as np\nassert np.allclose(list(map(np.sqrt, twice([2.0]))), [2.0])",
        "assert typed([1, -2], 'int8').tolist() == [1, -2] and typed(3, 'int16') == 3",
        "import numpy as np\nassert typed([300], 'int16').dtype == np.int16",
        "import numpy as np\nassert np.array_equal(typed([2**40, 1], 'int64'), np.array([2**40, 1]))",
        "assert typed(2**62 + 1, 'int64') == 2**62 + 1 and typed(0.5, 'float16') == 0.5",
        "assert twice(typed([200], 'uint8')).max() == 144",
        "import numpy as np\nout = []\nfor x in [1.0, 2.0]:\n    out.append(mean([x]))\n"
        "assert np.allclose(out, [1.0, 2.0])",
    ),
    EFFECTS: (
        "import io, contextlib\nsaid = io.StringIO()\nwith contextlib.redirect_stdout(said):\n    hello('é')\n"
        "assert said.getvalue() == 'hello é\\n'",
        "import io, sys\nsys.stdout = said = io.StringIO()\nhello(1)\nhello(2)\nsys.stdout = sys.__stdout__\n"
        "assert said.getvalue().split() == ['hello', '1', 'hello', '2']",
        "values = [3, 1]\nassert order(values) is None and values == [1, 3]",
        "values = [3, 1]\norder(values=values)\nassert values == [1, 3]",
        "values = []\nassert put(values, x=1) == 1\nassert values == [1]",
        "values = []\nassert [put(values, x) for x in (3, 4, 5)] == [1, 2, 3] and values == [3, 4, 5]",
        "def both(values):\n    put(values, 1)\n    values.append(2)\n    return put(values, 3)\n"
        "values = []\nassert both(values) == 3\nassert values == [1, 2, 3]",
        "values = []\nfor x in range(3):\n    put(values, x) if x else put(values, x=x)\nassert values == [0, 1, 2]",
        "values = []\nwhile len(values) < 3:\n    put(values, 1)\nassert values == [1, 1, 1]",
        "values, found = [3, 1, 2], []\nwhile values:\n    if values[0]:\n        found.append(take(values))\n"
        "        continue\nassert found == [3, 1, 2]",
        "values = [1]\nfor x in values:\n    if x < 3:\n        put(values, x + 1)\nassert values == [1, 2, 3]",
        "assert day('2020-01-02').strftime('%d.%m.') == '02.01.'",
        "box = Box()\nbox['a'] = 1\nassert box['a'] == 1\ndel box['a']\nassert box.of == {}",
    ),
    RAISES: (
        "try:\n    coded(7)\nexcept Coded as e:\n    assert e.code == 7 and str(e) == 'code 7'",
        "try:\n    key('k')\nexcept KeyError as e:\n    assert e.args == ('k',) and str(e) == \"'k'\"",
        "try:\n    leave(3)\nexcept SystemExit as e:\n    assert e.code == 3",
        "ok = False\ntry:\n    decode(b'\\xff')\nexcept UnicodeDecodeError as e:\n    ok = e.start == 0\nassert ok",
        "ok = False\ntry:\n    strange(1)\nexcept ValueError as e:\n    ok = 'object' in str(e)\nassert ok",
        "import pytest\nwith pytest.raises(ValueError, match='code 7'):\n    coded(7)",
    ),
    GLOBALS: ("assert f(3) == 3", "assert len(table) == 3_000_000", "assert LIMIT == 7 and words[0] == 'x' * 1000"),
}


@pytest.mark.parametrize("solution", RIGHT, ids=["iterators", "numpy", "effects", "exceptions", "globals"])
@in_module_loop
async def test_right_solutions_pass(judge: Judge, solution: str) -> None:
    tests = RIGHT[solution]
    verdicts = await judge(solution, *tests, test_seconds=20.0, total_seconds=60.0)
    assert [(test, v) for test, v in zip(tests, verdicts.of, strict=True) if not v.passed] == []


OWN_CLASSES = """
import math
from collections import UserDict
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def index(self, x): return self.items.index(x)
class stack(Stack): pass
def make_stack(): return Stack()
class Node:
    def __init__(self, value): self.value, self.count, self.title, self.next = value, 2, 't', None
def build(values):
    head = Node(values[0])
    head.next = Node(values[1])
    return head
class Cache:
    def __init__(self): self.of = {}
    def get(self, key): return self.of.get(key, -1)
    def put(self, key, value): self.of[key] = value
def table(): return UserDict(a=1)
def product(xs): return math.prod(xs)
def total(xs): return sum(xs)
def gcd(a, b): return math.gcd(a, b)
def lcm(a, b): return a * b // gcd(a, b)
def mean(xs): return sum(xs) / len(xs)
def f(x): return x
def dumps(x): return [x]
def loads(x): return x[0]
def chain(*fs): return lambda x: [f(x) for f in fs][-1]
"""
OF_OWN_CLASSES = (
    *(f"s = {make}()\ns.push(1)\nassert s.pop() == 1" for make in ("Stack", "stack", "make_stack")),
    "assert Stack().push(3).index(3) == 0",
    "for s in [Stack(), stack()]:\n    s.push(1)\n    assert s.pop() == 1",
    "head = build([1, 2])\nassert head.count == 2 and head.next.value == 2 and head.title == 't'",
    "c = Cache()\nc.put(1, 2)\nassert c.get(1) == 2",
    "assert dict(table()) == {'a': 1} and table()['a'] == 1 and sorted(table().items()) == [('a', 1)]",
    "assert total([1, 2]) == 3\nassert product([2, 3]) == 6",
    "xs = [2, 3]\nassert product(xs) == 6\nassert total(xs) == 5",
    "assert gcd(12, 8) == 4\nassert lcm(4, 6) == 12",
    "answer = product([2, 3])\nassert answer == 6\nassert total([2, 3]) == 5",
    "def test_total():\n    answer = total([1])\n    assert answer == 1\n"
    "def test_product():\n    answer = product([2, 3])\n    assert answer == 6\ntest_total()\ntest_product()",
    "class Test:\n    def same(self, a, b):\n        assert a == b\n    def test_product(self):\n"
    "        self.same(product([2, 3]), 6)\nTest().test_product()\nassert total([1]) == 1",
    "assert mean(list(range(3))) == 1 and product(list(range(1, 4))) == 6",
    "assert f(1.0) == approx(1) and allclose(f([1.0]), [1]) and f(5) == log10(100000)",
    "def check(candidate):\n    assert candidate('A').isupper()\ncheck(f)",
    "def check(candidate):\n    assert candidate([1, 2]) == 1.5 and total([1]) == 1\ncheck(mean)",
    "assert loads(dumps([1])) == [1] and chain(f, f)(3) == 3",
    "def apply(g):\n    return g(f(4))\nassert apply(sqrt) == 2",
)


@in_module_loop
async def test_own_classes_and_helpers_pass(judge: Judge) -> None:
    verdicts = await judge(OWN_CLASSES, *OF_OWN_CLASSES, total_seconds=60.0)
    assert [(test, v) for test, v in zip(OF_OWN_CLASSES, verdicts.of, strict=True) if not v.passed] == []


PROGRAMS = {
    "a thread that nobody waits for": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print(int(input()) + 1))).start()",
    "written at the end": "import atexit, io, sys\nsys.stdout = said = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(said.getvalue()))\nprint(int(input()) + 1)",
    "a file of its own on stdout": "out = open(1, 'w', closefd=False)\nout.write(str(int(input()) + 1))",
    "a stream of its own that writes at the end": "import os, sys\nparts = []\nclass Out:\n"
    "    def write(self, text): parts.append(text)\n"
    "    def flush(self): os.write(1, ''.join(parts).encode()); parts.clear()\n"
    "sys.stdout = Out()\nprint(int(input()) + 1)",
    "an object that writes when it ends": "import os\nclass Late:\n"
    "    def __del__(self): os.write(1, str(self.number + 1).encode())\nlate = Late()\nlate.number = int(input())",
    "a file under a name of the usual imports": "count = open(1, 'w', closefd=False)\n"
    "count.write(str(int(input()) + 1))",
    "a text that the compiler warns of": "count = open(1, 'w', closefd=False)\n"
    "if 1 is 1:\n    count.write(str(int(input()) + 1))",
    "names of its own only": "import collections\n"
    "fresh = 'told' not in globals() and not hasattr(collections, 'told')\n"
    "told = collections.told = 1\nprint(int(input()) + fresh)",
    "a long number": "print(int(str(10**5000)[:0] + input()) + len(str(10**5000)) - 5000)",
    "sys.exit": "import sys\nprint(int(sys.stdin.readline()) + 1)\nsys.exit()",
}


@pytest.mark.parametrize("name", PROGRAMS)
@in_module_loop
async def test_programs_end_as_python_ends_them(judge: Judge, name: str) -> None:
    verdicts = await judge(PROGRAMS[name], programs=(("41\n", "42\n"), ("41\n", "43\n")))
    assert [v.reason for v in verdicts.of] == ["passed", "output"]


@pytest.mark.parametrize("end", ["raise ValueError", "import os\nos.kill(os.getpid(), 9)", "1 / 0", "os.abort()"])
@in_module_loop
async def test_a_program_that_fails_has_failed_whatever_it_printed(judge: Judge, end: str) -> None:
    verdicts = await judge(f"print(int(input()) + 1, flush=True)\n{end}", programs=(("41\n", "42\n"),))
    assert [v.reason for v in verdicts.of] == ["error"]


@in_module_loop
async def test_whatever_a_test_raises_the_next_one_is_judged(judge: Judge) -> None:
    """What pytest raises is no Exception."""
    fails = "import pytest\nwith pytest.raises(KeyError):\n    f(1)"
    verdicts = await judge("def f(x):\n    return x", fails, "raise GeneratorExit", "assert f(1) == 1")
    assert [v.reason for v in verdicts.of] == ["error", "error", "passed"]
