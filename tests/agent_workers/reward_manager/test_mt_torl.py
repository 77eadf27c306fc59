from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from graded_rows import data, manager, trajectory

from verl_tool.agent_loop.trajectory import CallRecord, Excluded, StopReason
from verl_tool.agent_workers.reward_manager.mt_torl import TurnOptions, turn_rewards
from verl_tool.protocol import Fault, FaultKind

GOOD = CallRecord(0, "<python>1</python>", "1")
BAD = CallRecord(1, "<python>x</python>", "Traceback (most recent call last):\n")
INVALID = CallRecord(2, "what", "No tool call found.", valid=False)


def test_the_turns_add_up_to_the_published_formula() -> None:
    calls = (GOOD, BAD, INVALID, GOOD)
    rewards = turn_rewards(calls, TurnOptions())
    assert rewards == pytest.approx((0.125, 0.0, 0.0, 0.125))
    assert sum(rewards) == pytest.approx(0.3 * 2 / 4 + 0.05 * 2)
    assert turn_rewards((), TurnOptions()) == ()


def test_calls_for_their_own_sake_pay_no_more_than_so_much() -> None:
    rewards = turn_rewards((GOOD,) * 100, TurnOptions())
    assert sum(map(bool, rewards)) == 8
    assert sum(rewards) < 0.5


async def told(answer: str, *calls: CallRecord, of: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    graded = manager("mt_torl", compare_processes=1, **(of or {}))
    turns = [("model", "<python>"), ("tool", "seen")] * len(calls)
    return await graded.run_single(data(trajectory(*turns, ("model", answer), calls=calls, **fields), "72"))


async def test_the_score_is_the_answers_and_the_turns() -> None:
    right = await told("\\boxed{72}", GOOD, BAD)
    assert right["reward_score"] == pytest.approx(1.2)
    assert right["reward_extra_info"]["base_score"] == 1.0
    assert right["reward_extra_info"]["turn_reward"] == pytest.approx(0.2)
    assert json.loads(right["reward_extra_info"]["turn_rewards"]) == pytest.approx([0.2, 0.0])
    alone = await told("\\boxed{72}", GOOD, of={"turn_weight": 0.0})
    assert alone["reward_score"] == 1.0
    assert (await told("\\boxed", GOOD))["reward_score"] == pytest.approx(-0.65)


async def test_a_batch_of_them_is_an_array_as_verl_makes_it() -> None:
    """verl calls numpy on the values of all rows, which takes no lists of unequal length."""
    faulted = Fault(kind=FaultKind.SANDBOX, message="no sandbox", retryable=False)
    rows = [
        await told("\\boxed{72}", GOOD, BAD),
        await told("\\boxed{72}"),
        await told("", stop=StopReason.FAULT, fault=faulted, excluded=Excluded.FAULT),
    ]
    infos = [row["reward_extra_info"] for row in rows]
    assert len({tuple(sorted(info)) for info in infos}) == 1
    column = np.array([info["turn_rewards"] for info in infos])
    assert [json.loads(each) for each in column] == [[0.2, 0.0], [], []]
    assert math.isnan(infos[2]["turn_reward"])
