from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from graded_rows import data, manager, trajectory

from verl_tool.agent_loop.trajectory import CallRecord
from verl_tool.agent_workers.reward_manager.grading.manager_worker import grade, manager_of
from verl_tool.agent_workers.reward_manager.redteam import redteam_cli
from verl_tool.errors import ConfigError

MANAGERS: dict[str, Any] = {
    "gsm8k": {"name": "gsm8k", "kwargs": {"right": 2, "shaping": {"tool_cost": {"weight": -0.5}}}},
    "nq*": {"name": "search_f1"},
    "*": {"name": "calculator"},
}
CALLS = (CallRecord(0, "<python>1</python>", "1", names=("python",)),)


async def told(answer: str, gold: str, source: str, **options: Any) -> dict[str, Any]:
    made = manager("by_source", **{"managers": MANAGERS, **options})
    row = data(trajectory(("model", answer), calls=CALLS), gold, data_source=source, ability="math")
    return await made.run_single(row)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "source", "score"),
    [
        ("#### 72", "gsm8k", 1.5),
        ("#### 71", "gsm8k", -0.5),
        ("<answer>72 m</answer>", "nq_test", 2 / 3),
        ("#### 72", "nq_test", 0.0),
        ("Result=72<submit>", "calculator", 1.0),
        ("#### 72", "anything", 0.0),
    ],
)
async def test_each_row_is_graded_by_its_own_manager_and_shaping(answer: str, source: str, score: float) -> None:
    assert (await told(answer, "72", source))["reward_score"] == pytest.approx(score)


async def test_all_rows_tell_the_same_values() -> None:
    infos = [(await told("#### 72", "72", source))["reward_extra_info"] for source in ("gsm8k", "nq", "x")]
    assert infos[0].keys() == infos[1].keys() == infos[2].keys()
    assert infos[0]["shaping/tool_cost"] == -0.5
    assert math.isnan(infos[0]["f1"])
    assert math.isnan(infos[1]["shaping/tool_cost"])
    assert infos[1]["f1"] == 0.0


async def test_rows_of_a_manager_that_rewards_no_turns_have_an_empty_list() -> None:
    managers = MANAGERS | {"nq*": {"name": "search_f1", "kwargs": {"turn_rewards": {}}}}
    assert manager("by_source", managers=managers).by_turns
    for source, rewards in (("nq", "[0.2]"), ("gsm8k", "[]")):
        assert (await told("#### 72", "72", source, managers=managers))["reward_extra_info"]["turn_rewards"] == rewards


async def test_the_ability_may_pick() -> None:
    assert (await told("#### 72", "72", "?", by="ability", managers={"math": {"name": "gsm8k"}}))["reward_score"] == 1.0


async def test_a_row_that_none_is_for_is_a_fault() -> None:
    result = await told("#### 72", "72", "other", managers={"gsm8k": {"name": "gsm8k"}, "nq": {"name": "search_f1"}})
    extra = result["reward_extra_info"]
    assert (
        "a row has data_source 'other', which no entry of reward_kwargs.managers matches: gsm8k, nq"
        in extra["reward_fault"]
    )
    assert math.isnan(extra["acc"])
    assert "f1" in extra


async def test_a_manager_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl_tool.agent_workers.reward_manager.base import GradingRewardManager\n"
        "from verl_tool.agent_workers.reward_manager.grade import Grade\n"
        "class Mine(GradingRewardManager):\n"
        "    async def grade(self, sample):\n"
        "        return Grade(7.0, True)\n"
    )
    entry = {"name": "Mine", "path": str(file)}
    assert (await told("x", "72", "a", managers={"a": entry}))["reward_score"] == 7.0


@pytest.mark.parametrize(
    ("managers", "words"),
    [
        ({}, "reward.reward_kwargs.managers: "),
        ({"a": {"name": "no_such"}}, "reward.reward_kwargs.managers.a: 'no_such' cannot be made"),
        (
            {"a": {"name": "gsm8k", "kwargs": {"rigth": 1}}},
            "reward.reward_kwargs.managers.a: reward.reward_kwargs.rigth",
        ),
        ({"a": {"name": "sqlcoder"}}, "reward.reward_kwargs.managers.a: reward.reward_kwargs.root is not set"),
        ({"a": {"name": "naive"}}, "'naive' does not extend GradingRewardManager"),
        ({"a": {"nam": "gsm8k"}}, "reward.reward_kwargs.managers.a.name: "),
    ],
)
async def test_an_entry_that_is_wrong_is_named(managers: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        await told("x", "72", "a", managers=managers)
    assert words in str(error.value)


async def test_no_wrong_answer_pays() -> None:
    rows = [
        {"ground_truth": "72", "data_source": "gsm8k"},
        {"ground_truth": '["Danube"]', "data_source": "nq"},
        {"ground_truth": "72", "data_source": "other"},
    ]
    made = manager_of("by_source", {"managers": MANAGERS})
    report = redteam_cli.RedTeamReport()
    for case in redteam_cli.cases_of(rows, 5):
        report.add(case, await grade(made, case, redteam_cli.SECONDS))
    assert report.accepted
    assert report.credit[0] < 1
    assert [(finding.attack.name, finding.ground_truth) for finding in report.found] == []
