"""What a test does to a container of an object of the solution's is done to the solution's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from verl_tool.judge.code_tests import Verdicts

pytestmark = pytest.mark.slow

Judge = Callable[..., Awaitable[Verdicts]]
in_module_loop = pytest.mark.asyncio(loop_scope="module")

SOLUTION = """
from collections import defaultdict, deque
class Node:
    shared = []
    def __init__(self, value=0):
        self.value, self.children, self.d, self.seen = value, [], {}, set()
        self.grid, self.queue, self.counts = [[0, 0], [0, 0]], deque(), defaultdict(int)
        self.frozen = (1, 2)
    def total(self): return self.value + sum(child.total() for child in self.children)
    def keys(self): return sorted(self.d)
    def __getitem__(self, key): return self.d[key]
    @property
    def copied(self): return list(self.children)
def size(node): return len(node.children)
def swap(node): node.children.reverse(); return node
def wrong(node): return 0
"""


@pytest.mark.parametrize(
    "test",
    [
        "n = Node(1)\nn.children.append(Node(2))\nn.children.append(Node(3))\nassert n.total() == 6",
        "n = Node()\nn.children.append(1)\nassert len(n.children) == 1 and n.children == [1] and size(n) == 1",
        "n = Node()\nn.d['a'] = 1\nn.d['b'] = 2\ndel n.d['a']\nassert n.keys() == ['b'] and n['b'] == 2",
        "n = Node()\nn.grid[1][0] = 5\nassert n.grid == [[0, 0], [5, 0]]",
        "n = Node()\nn.seen.add(3)\nn.seen |= {4}\nassert n.seen == {3, 4}",
        "n = Node()\nn.queue.appendleft(1)\nn.queue.append(2)\nassert list(n.queue) == [1, 2]",
        "n = Node()\nn.counts['x'] = 2\nassert n.counts['x'] == 2",
        "n = Node()\nk = n.children\nfor i in range(3):\n    k.append(Node(i))\nassert (size(n), n.total()) == (3, 3)",
        "n = Node()\nn.d['list'] = []\nn['list'].append(7)\nassert n.d == {'list': [7]}",
        "a, b = Node(), Node()\na.children.append(b)\nb.children.append(Node(4))\nassert a.total() == 4",
        "n = Node()\nn.children.extend([1, 2])\nassert swap(n).children == [2, 1]",
        "n = Node()\nassert (n.children.append(1), size(n))[1] == 1",
        "n = Node()\nn.copied.append(1)\nassert size(n) == 0",
        "Node.shared.append(1)\nassert Node().shared == [1]",
        "n = Node()\nn.children = [3, 1]\nn.children.sort()\nassert n.children == [1, 3]",
    ],
)
@in_module_loop
async def test_as_in_python(judge: Judge, test: str) -> None:
    assert [(v.reason, v.detail) for v in (await judge(SOLUTION, test)).of] == [("passed", "")]


@in_module_loop
async def test_a_test_of_a_wrong_function_fails_still(judge: Judge) -> None:
    verdicts = await judge(SOLUTION, "n = Node()\nn.children.append(1)\nassert wrong(n) == 1")
    assert [v.reason for v in verdicts.of] == ["assertion"]


@in_module_loop
async def test_an_object_of_the_test_is_refused_and_counted(judge: Judge) -> None:
    test = "class Mine: pass\nn = Node()\nn.children.append(Mine())\nassert size(n) == 1"
    verdicts = await judge(SOLUTION, test)
    assert verdicts.refused == 1


@in_module_loop
async def test_a_list_that_is_read_often_costs_no_second_a_look(judge: Judge) -> None:
    test = "n = Node()\nn.d = {1: [0] * 2000}\nfor i in range(300):\n    n.d[1][i] = i\nassert sum(n.d[1]) == 44850"
    assert [v.reason for v in (await judge(SOLUTION, test, test_seconds=20.0, total_seconds=30.0)).of] == ["passed"]
