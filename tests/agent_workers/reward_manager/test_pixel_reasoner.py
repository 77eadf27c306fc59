r"""Answers to questions about images, and the terms for calls. Wrong answers: `test_redteam.py`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from graded_rows import data, manager, scored, trajectory

from verl_tool.agent_loop.trajectory import CallRecord
from verl_tool.agent_workers.reward_manager.pixel_reasoner import golden_answers, normalised

pytestmark = pytest.mark.slow

ZOOM = CallRecord(0, "<tool_call>zoom</tool_call>", "seen")
NO_CALL = CallRecord(0, "zoom", "No tool call found.", valid=False)


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        (r"\boxed{B}", "B", 1.0),
        (r"It is \boxed{b}", r"\boxed{B}", 1.0),
        (r"\boxed{\text{Red car}}", "red car", 1.0),
        (r"\boxed{12 cm}", "12", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1.0),
        (r"\boxed{two}", ["2", "two"], 1.0),
        (r"\boxed{C}", "B", 0.0),
        ("B", "B", 0.0),
        (r"\boxed{red}", "red car", 0.0),
        (r"\boxed{3}", ["2", "two"], 0.0),
    ],
)
async def test_an_answer(answer: str, gold: Any, score: float) -> None:
    assert await scored(manager("pixel_reasoner", compare_processes=1), answer, gold) == score


def test_what_is_compared() -> None:
    assert list(golden_answers([r"\boxed{A}", "B"])) == ["A", "B"]
    assert normalised(r"\text{20 minutes}") == "{20 }"
    assert normalised("commcm") == "commcm"


@pytest.mark.parametrize(
    ("calls", "score", "curiosity"),
    [
        ((), 1.0, 0.0),
        ((NO_CALL,), 1.0, 0.0),
        ((ZOOM,), 1.0, 0.5),
        ((ZOOM, NO_CALL, ZOOM), 0.95, 0.5),
        ((ZOOM,) * 4, 0.85, 0.5),
    ],
)
async def test_calls_cost_from_the_second_on(calls: tuple[CallRecord, ...], score: float, curiosity: float) -> None:
    """And that any is worth something is left to the trainer, which knows the group."""
    graded = await manager("pixel_reasoner").run_single(data(trajectory(("model", r"\boxed{B}"), calls=calls), "B"))
    told = graded["reward_extra_info"]
    assert graded["reward_score"] == pytest.approx(score)
    assert (told["acc"], told["curiosity"], told["min_share"]) == (1.0, curiosity, 0.3)
    assert told["redundancy"] == pytest.approx(score - 1)


async def test_both_terms_can_be_left_out() -> None:
    of = manager("pixel_reasoner", curiosity=0, redundancy=0)
    graded = await of.run_single(data(trajectory(("model", r"\boxed{C}"), calls=(ZOOM,) * 9), "B"))
    assert (graded["reward_score"], graded["reward_extra_info"]["curiosity"]) == (0.0, 0.0)
