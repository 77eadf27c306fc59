"""Comparing mathematical answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("math_verify")

from verl_tool.agent_workers.reward_manager.grading.math_grader import MathGrader
from verl_tool.agent_workers.reward_manager.grading.math_process import WORN_KILOBYTES

pytestmark = pytest.mark.slow
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader():  # type: ignore[no-untyped-def]
    running = MathGrader(processes=2, seconds=5.0)
    yield running
    await running.close()


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("42", "42", True),
        (r"\frac{1}{2}", r"3 | \frac{1}{2}", False),
        (r"\frac{1}{2}", r"3 \mid \frac{1}{2}", False),
        ("7", "3; 7", False),
        ("7", "|-7|", True),
        ("12_8", "12_7", False),
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac{1}{6}", "1/6", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("1,234", "1234", True),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("x=3", "3", True),
        ("3", "x = 1 + 2 = 3", True),
        (r"50\%", "50", True),
        ("50", r"50\%", True),
        (r"50\%", r"50.0\%", True),
        (r"12.5\%", r"\frac{25}{2}", True),
        (r"50\%", "0.5", False),
        ("0.5", r"50\%", False),
        (r"\frac{1}{2}", "50%", False),
        (r"50\%", r"0.5\%", False),
        (r"50\%", "5", False),
        ("7", "8=7", False),
        ("7", "7_2", False),
        ("72", "7,2", False),
        ("7", "7, 8, 9", False),
        ("7", r"7 \text{ or } 8", False),
        ("7", r"\{7, 8\}", False),
        ("7", r"\pm 7", False),
        ("yes", r"\text{Yes}", True),
        (r"\text{on}", r"\text{no}", False),
        ("left", "felt", False),
        ("no", "on", False),
        ("No", r"\text{no}", True),
        (r"6.626\times10^{-34}", r"6.626\cdot10^{-34}", True),
        (r"6.626\times10^{-34}", r"0.6626\times 10^{-33}", True),
        (r"6.626\times10^{-34}", r"1.6\times10^{-19}", False),
        (r"\frac{1}{2^{30}}", "0.0", False),
        (r"\frac{1}{2^{30}}", "0.000000000931", True),
        ("e^{-20}", "0.0", False),
        (r"\frac{1}{3000}", "0.000333", True),
        (r"\frac{1}{1000003}", "0.000001", True),
        (r"\frac{1}{1000003}", "0.0000013", False),
        (r"\{10^{-9}, 1\}", r"\{1, 0.000000001\}", True),
        (r"\begin{pmatrix}10^{-9}\end{pmatrix}", r"\begin{pmatrix}0.0\end{pmatrix}", False),
        (r"(10^{-9}, 1)", "(0.0, 1)", False),
        (r"10^{400}", "10^{400}", True),
        (r"\frac{1}{10^{400}}", "0.0", False),
        ("3", "4", False),
        ("3", "", False),
        ("3", "I do not know", False),
        ("(1, 2)", "(2, 1)", False),
        ("3", r"\frac{", False),
        ("3", "}}}{{{", False),
    ],
)
@in_module_loop
async def test_answers(grader: MathGrader, gold: str, answer: str, equal: bool) -> None:
    assert await grader.equal(gold, answer) is equal


@in_module_loop
async def test_nothing_of_an_answer_is_evaluated(grader: MathGrader, tmp_path: Path) -> None:
    target = tmp_path / "pwned"
    for answer in (
        f"__import__('os').system('touch {target}')",
        f"(lambda: open('{target}', 'w'))()",
        f"\\text{{__import__('pathlib').Path('{target}').touch()}}",
    ):
        assert await grader.equal("2", answer) is False
    assert not target.exists()


@in_module_loop
async def test_a_comparison_without_end_is_wrong_and_spoils_no_other() -> None:
    slow = MathGrader(processes=1, seconds=2.0)
    bombs = ["9^{9^{9^{9^{9}}}} - 9^{9^{9^{9^{8}}}}", "(x+1)^{99999}+9^{9^{9}}", "{" * 900 + "}" * 900, "9" * 900 + "!"]
    try:
        found = await asyncio.gather(*(slow.equal("2", answer) for answer in [*bombs, "1+1", "4/2"]))
        assert found == [False] * len(bombs) + [True, True]
    finally:
        await slow.close()


@in_module_loop
async def test_a_process_is_used_again_however_large_its_starter_is() -> None:
    """A training's worker has more memory than a process may have that is kept."""
    bytearray(WORN_KILOBYTES << 10)
    grader = MathGrader(processes=1, seconds=20.0)
    try:
        assert await grader.equal("1/2", "0.5")
        [first] = grader._idle
        assert await grader.equal("1/4", "0.25")
        assert grader._idle == [first]
    finally:
        await grader.close()


@in_module_loop
async def test_many_at_once(grader: MathGrader) -> None:
    found = await asyncio.gather(*(grader.equal(str(i), f"{i + i % 2}.0") for i in range(20)))
    assert found == [i % 2 == 0 for i in range(20)]
