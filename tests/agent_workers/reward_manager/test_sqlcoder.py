from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from databases import make_singers
from graded_rows import data, manager, trajectory

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grading.manager_worker import grade, manager_of
from verl_tool.agent_workers.reward_manager.redteam import redteam_cli
from verl_tool.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
AGES = "SELECT age FROM singer ORDER BY age"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("databases")
    make_singers(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def by_set(root: Path) -> AsyncIterator[GradingRewardManager[Any]]:
    made = manager("sqlcoder", root=str(root), processes=1, query_seconds=1, published=False)
    yield made
    await made.close()  # type: ignore[attr-defined]


async def graded(of: GradingRewardManager[Any], query: str, gold: str, db_id: Any = "singers") -> dict[str, Any]:
    extra = {"index": 7, "tools_kwargs": {"db_id": db_id}}
    row = data(trajectory(("model", f"<think>so</think><solution>{query}</solution>")), gold, extra_info=extra)
    return await of.run_single(row)


async def score(of: GradingRewardManager[Any], query: str, gold: str) -> float:
    told = await graded(of, query, gold)
    assert told["reward_extra_info"]["reward_fault"] == ""
    assert told["reward_extra_info"]["reward_provoked"] == ""
    return float(told["reward_score"])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT age FROM singer", 1.0),
        ("```sql\nSELECT DISTINCT age AS years FROM singer;\n```", 1.0),
        ("SELECT age + 0.0 FROM singer", 1.0),
        ("SELECT age FROM singer WHERE age > 24", 0.0),
        ("SELECT age, name FROM singer", 0.0),
        ("VALUES (24), (31)", 0.0),
        ("SELEC age FROM singer", 0.0),
        ("SELECT age FROM singer; SELECT 1", 0.0),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n", 0.0),
        ("", 0.0),
    ],
)
async def test_results_match_as_sets(by_set: GradingRewardManager[Any], query: str, expected: float) -> None:
    assert await score(by_set, query, AGES) == expected


async def test_bags_and_order_tell_more(root: Path) -> None:
    for match, same, other in (
        ("bag", "SELECT age FROM singer ORDER BY age DESC", "SELECT DISTINCT age FROM singer"),
        ("ordered", "SELECT age FROM singer ORDER BY age, name", "SELECT age FROM singer ORDER BY age DESC"),
    ):
        made = manager("sqlcoder", root=str(root), processes=1, match=match, published=False)
        assert await score(made, same, AGES) == 1.0, match
        assert await score(made, other, AGES) == 0.0, match
        await made.close()  # type: ignore[attr-defined]


async def test_the_format_of_skyrl_sql(root: Path) -> None:
    made = manager("sqlcoder", root=str(root), processes=1)
    solution = f"<solution>{AGES}</solution>"
    scores = {}
    for turns in (
        (f"<think>a</think>{solution}",),
        ("<think>a</think><sql>SELECT 1</sql>", f" <think>b</think>{solution}"),
        ("<sql>SELECT 1</sql>", f"<think>b</think>{solution}"),
        (solution,),
        ("<think>a</think> I do not know",),
        ("<think>a</think><solution>SELECT 1</solution>",),
    ):
        written = [part for turn in turns for part in (("model", turn), ("tool", "x"))]
        row = data(trajectory(*written), AGES, extra_info={"tools_kwargs": {"db_id": "singers"}})
        scores[turns] = (await made.run_single(row))["reward_score"]
    await made.close()  # type: ignore[attr-defined]
    assert list(scores.values()) == [1.0, 1.0, -1.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("gold", "db_id", "words"),
    [
        ("SELEC 1", "singers", "the gold query 'SELEC 1' fails: near"),
        ("SELECT age FROM singer WHERE age > 99", "singers", "gives no row"),
        (AGES, "no_such", "there is no database 'no_such'"),
        (AGES, "../singers", "db_id is '../singers'"),
        (AGES, None, "db_id is None"),
    ],
)
async def test_a_row_that_cannot_be_graded_is_a_fault_that_names_it(
    by_set: GradingRewardManager[Any], gold: str, db_id: Any, words: str
) -> None:
    told = await graded(by_set, AGES, gold, db_id)
    fault = told["reward_extra_info"]["reward_fault"]
    assert words in fault
    assert "row 7 of 'test'" in fault
    assert math.isnan(told["reward_extra_info"]["acc"])


async def test_an_empty_result_is_compared_on_request(root: Path) -> None:
    made = manager("sqlcoder", root=str(root), processes=1, empty_gold=True, published=False)
    assert await score(made, "SELECT age FROM singer WHERE age > 98", "SELECT age FROM singer WHERE age > 99") == 1.0
    await made.close()  # type: ignore[attr-defined]


async def test_it_is_not_made_without_its_folder() -> None:
    for options in ({}, {"root": "/no/such/folder"}):
        with pytest.raises(ConfigError, match=r"reward\.reward_kwargs\.root "):
            manager("sqlcoder", **options)


@pytest.mark.parametrize("match", ["set", "bag", "ordered"])
async def test_no_wrong_query_pays(root: Path, match: str) -> None:
    rows = [
        {"ground_truth": gold, "ability": "sql", "extra_info": {"tools_kwargs": {"db_id": "singers"}}}
        for gold in ("SELECT count(*) FROM singer", "SELECT name, age FROM singer WHERE age < 30")
    ]
    made = manager_of(
        "sqlcoder", {"root": str(root), "processes": 1, "query_seconds": 0.3, "match": match, "published": False}
    )
    report = redteam_cli.RedTeamReport()
    every = 1 if match == "set" else 5
    for case in redteam_cli.cases_of(rows, every):
        report.add(case, await grade(made, case, redteam_cli.SECONDS))
    await made.close()
    assert report.accepted
    assert [(finding.attack.name, finding.ground_truth) for finding in report.found] == []
