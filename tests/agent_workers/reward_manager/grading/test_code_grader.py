"""Which solutions are judged, and which share a verdict."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("verl.protocol")

from verl_tool.agent_workers.reward_manager.grade import GraderFault
from verl_tool.agent_workers.reward_manager.grading.code_grader import MAX_STORED, CodeGrader, CodeOptions
from verl_tool.judge.code_tests import TestSuite, Verdicts

SUITE, OTHER = TestSuite(("assert f(1) == 2",)), TestSuite(("assert f(1) == 3",))


class Counting(CodeGrader):
    """Notes what it is asked to judge; each answer waits until it may come."""

    def __init__(self, **options: bool) -> None:
        super().__init__(CodeOptions(**options), "http://127.0.0.1:1")
        self.judged: list[tuple[str, TestSuite]] = []
        self.may_end = asyncio.Event()
        self.faults = 0

    async def _judge(self, code: str, suite: TestSuite) -> Verdicts:
        self.judged.append((code, suite))
        await self.may_end.wait()
        if self.faults:
            self.faults -= 1
            raise GraderFault("no server")
        return Verdicts((), protected=True)


async def under_way(*asked: asyncio.Task[Verdicts]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_equal_solutions_of_a_problem_are_judged_once():
    grader = Counting()
    tasks = [asyncio.create_task(grader.judge(code, suite)) for code in ("a", "b", "a") for suite in (SUITE, OTHER)]
    await under_way(*tasks)
    grader.may_end.set()
    await asyncio.gather(*tasks)
    await grader.judge("a", SUITE)
    assert sorted(grader.judged, key=str) == sorted([(c, s) for c in "ab" for s in (SUITE, OTHER)], key=str)


@pytest.mark.asyncio
async def test_each_by_itself_where_the_options_say_so():
    grader = Counting(judge_equal_once=False)
    grader.may_end.set()
    await asyncio.gather(*(grader.judge("a", SUITE) for _ in range(3)))
    assert len(grader.judged) == 3


@pytest.mark.asyncio
async def test_a_fault_is_not_shared():
    grader = Counting()
    grader.faults = 1
    tasks = [asyncio.create_task(grader.judge("a", SUITE)) for _ in range(3)]
    await under_way(*tasks)
    grader.may_end.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, GraderFault) for one in ended] == [True, False, False]
    assert isinstance(await grader.judge("a", SUITE), Verdicts)


@pytest.mark.asyncio
async def test_who_is_cancelled_takes_nobody_along():
    grader = Counting()
    first, second, third = (asyncio.create_task(grader.judge("a", SUITE)) for _ in range(3))
    await under_way(first, second, third)
    second.cancel()
    first.cancel()
    await under_way(third)
    grader.may_end.set()
    assert isinstance(await third, Verdicts)
    assert first.cancelled()
    assert second.cancelled()
    assert len(grader.judged) == 2


@pytest.mark.asyncio
async def test_not_all_solutions_are_remembered_for_ever():
    grader = Counting()
    grader.may_end.set()
    for i in range(MAX_STORED + 1):
        await grader.judge(str(i), SUITE)
    await grader.judge("0", SUITE)
    assert len(grader.judged) == MAX_STORED + 2
    assert len(grader._judged) == MAX_STORED
