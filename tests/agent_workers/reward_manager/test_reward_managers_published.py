"""`published=false` of each manager that has it, and the tables of `rewards.md`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from databases import make_singers
from graded_rows import data, manager, trajectory
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

from verl_tool.agent_workers.reward_manager import registry

pytestmark = pytest.mark.slow

registry.register_all()
in_module_loop = pytest.mark.asyncio(loop_scope="module")
PAGE = (Path(__file__).parents[3] / "assets/docs/rewards.md").read_text(encoding="utf-8")

RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
HALF = RIGHT.replace("a + b", "a * b")
TESTS = json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]})


async def score(made: Any, text: str, gold: str, **row: Any) -> float:
    told = await made.run_single(data(trajectory(("model", text)), gold, **row))
    assert told["reward_extra_info"]["reward_fault"] == ""
    return float(told["reward_score"])


@pytest.mark.parametrize("name", ["acecoder", "mathcoder"])
@pytest.mark.parametrize(
    ("options", "half", "nothing"),
    [
        ({}, -1.0, -1.0),
        ({"published": False}, -1.0, -1.0),
        ({"binary": False}, 0.5, 0.0),
        ({"binary": False, "published": False}, 0.0, -1.0),
        ({"binary": False, "published": False, "wrong": -0.5}, 0.25, -0.5),
    ],
)
@in_module_loop
async def test_code(code_server_url: str, name: str, options: dict[str, Any], half: float, nothing: float) -> None:
    made = manager(name, server_url=code_server_url, **options)
    grader = getattr(made, "_grader", None) or made._code  # type: ignore[attr-defined]
    try:
        found = [await score(made, text, TESTS, ability="code") for text in (RIGHT, HALF, "no code")]
    finally:
        await grader.close()
    assert found == [1.0, half, nothing]


@pytest.mark.parametrize(("published", "tags", "expected"), [(True, 10, 1), (True, 11, 0.25), (False, 11, 1)])
async def test_search(published: bool, tags: int, expected: float) -> None:
    text = "<answer>no</answer> " * (tags - 1) + "<answer>Danube</answer>"
    assert await score(manager("search_r1_qa_em", published=published), text, '["Danube"]') == expected


@pytest.mark.parametrize(
    ("text", "published", "otherwise"),
    [
        ("<think>so</think><solution>SELECT age FROM singer</solution>", 1.0, 1.0),
        ("<think>so</think><solution>SELECT name FROM singer</solution>", 0.0, 0.0),
        ("<solution>SELECT age FROM singer</solution>", -1.0, 1.0),
        ("<think>so</think><solution>SELECT 1</solution><solution>SELECT age FROM singer</solution>", -1.0, 1.0),
        ("<think>so</think>nothing", -1.0, 0.0),
    ],
)
@in_module_loop
async def test_sqlcoder(tmp_path: Path, text: str, published: float, otherwise: float) -> None:
    make_singers(tmp_path)
    row = {"extra_info": {"tools_kwargs": {"db_id": "singers"}}}
    for option, expected in ((True, published), (False, otherwise)):
        made = manager("sqlcoder", root=str(tmp_path), processes=1, published=option)
        try:
            assert await score(made, text, "SELECT age FROM singer", **row) == expected
        finally:
            await made.close()  # type: ignore[attr-defined]


def rows_under(heading: str) -> dict[str, str]:
    """The rows of the table below a heading, by each name in their first cell."""
    section = f"\n{PAGE}".partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|", 2)[1:] for line in section.splitlines() if line.startswith("| `")]
    return {name: rest for first, rest in rows for name in re.findall(r"`(\w+)`", first)}


def test_both_tables_have_each_manager() -> None:
    assert set(rows_under("# Reward managers")) == set(registry.NAMES)
    assert set(rows_under("## Published definitions")) == set(registry.NAMES) - {"by_source"}


def test_the_table_says_where_published_is_an_option() -> None:
    has = {name for name in registry.NAMES if "published" in get_reward_manager_cls(name).Options.model_fields}
    assert {name for name, row in rows_under("## Published definitions").items() if "published=false" in row} == has


@pytest.mark.parametrize("name", sorted(set(registry.NAMES) - {"by_source", "environment", "terminal", "search_f1"}))
def test_the_table_has_the_default_scores(name: str) -> None:
    cell = rows_under("# Reward managers")[name]
    if "as these" in cell:
        cell = rows_under("# Reward managers")["torl"]
    fields = get_reward_manager_cls(name).Options.model_fields
    right, wrong = (fields[field].default for field in ("right", "wrong"))
    assert re.search(rf"\| {right:g}, {wrong:g}\b", cell), cell
