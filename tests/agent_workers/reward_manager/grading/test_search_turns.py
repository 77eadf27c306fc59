from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from graded_rows import data, manager, trajectory

from verl_tool.agent_loop.trajectory import CallRecord
from verl_tool.agent_workers.reward_manager.grading.search_turns import SearchTurns, search_turn_rewards
from verl_tool.agent_workers.reward_manager.search_r1_qa_em import mentions

FOUND = CallRecord(0, "<search>river through Vienna</search>", "Doc 1(Title: Vienna) It lies on the Danube.")
OTHER = CallRecord(1, "<search>Vienna</search>", "Doc 1(Title: Vienna) A city.")
GUESSED = CallRecord(2, "<search>Danube</search>", "Doc 1(Title: Danube) A river.")
REFUSED = CallRecord(3, "<search></search>", "Danube", valid=False, invalid_reason="no query")
DONE = CallRecord(4, "<answer>Danube</answer>", done=True)


def rewards(*calls: CallRecord, **options: float) -> tuple[float, ...]:
    return search_turn_rewards(calls, lambda text: mentions(text, ["the Danube"]), SearchTurns(**options))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((OTHER, FOUND, DONE), (0.2, 0.7, 0.0)),
        ((FOUND, OTHER, FOUND), (0.7, 0.0, 0.0)),
        ((OTHER, OTHER, FOUND), (0.2, 0.0, 0.7)),
        ((GUESSED, FOUND), (0.2, 0.0)),
        ((REFUSED, FOUND), (0.0, 0.7)),
        ((), ()),
    ],
)
def test_a_search_is_rewarded_for_what_it_brings(calls: tuple[CallRecord, ...], expected: tuple[float, ...]) -> None:
    assert rewards(*calls) == pytest.approx(expected)


def test_many_searches_may_cost_more_and_more() -> None:
    assert rewards(OTHER, FOUND, OTHER, DONE, count_penalty=0.1) == pytest.approx((0.1, 0.5, -0.3, 0.0))


@pytest.mark.parametrize(
    ("text", "golden", "held"),
    [
        ("It lies on the DANUBE.", ["Danube"], True),
        ("In 1972 it flooded.", ["72"], False),
        ("Yes, it does.", ["yes"], False),
        ("A city.", ["The"], False),
        ("J. S. Bach", ["Rhine", "js bach"], False),
        ("the Well-Tempered Clavier", ["Well Tempered", "Clavier"], True),
    ],
)
def test_an_answer_is_held_as_whole_words(text: str, golden: list[str], held: bool) -> None:
    assert mentions(text, golden) == held


@pytest.mark.parametrize("name", ["search_r1_qa_em", "search_f1"])
@pytest.mark.parametrize(("weight", "score"), [(0.0, 1.0), (1.0, 1.9)])
async def test_the_managers_of_search_tell_them(name: str, weight: float, score: float) -> None:
    turns = [("model", "<search>"), ("tool", "seen"), ("model", "<search>"), ("tool", "seen")]
    of = trajectory(*turns, ("model", "<answer>Danube</answer>"), calls=(OTHER, FOUND))
    graded = await manager(name, turn_rewards={"weight": weight}).run_single(data(of, '["the Danube"]'))
    told = graded["reward_extra_info"]
    assert json.loads(told["turn_rewards"]) == pytest.approx([0.2, 0.7])
    assert (told["turn_reward"], told["base_score"], graded["reward_score"]) == pytest.approx((0.9, 1.0, score))
    plain = await manager(name).run_single(data(of, '["the Danube"]'))
    assert "turn_rewards" not in plain["reward_extra_info"]
