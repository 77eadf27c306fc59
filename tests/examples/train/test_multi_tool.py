"""The recipe with four tools: its questions, what its tiny model learns from, and its table."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script

pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("bm25s")
pd = pytest.importorskip("pandas")

from verl_tool.agent_loop.trajectory import CallRecord, StopReason, Trajectory  # noqa: E402
from verl_tool.servers.execution.in_process import InProcessTools  # noqa: E402
from verl_tool.servers.tool_config import ToolConfig  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = EXAMPLES / "train" / "multi_tool"
TOOLS = ("calculator", "search", "sql", "python")
SIZE = 32


@pytest.fixture(scope="module")
def world() -> ModuleType:
    return load_script("multi_tool_world", RECIPE / "tool_world.py")


@pytest.fixture(scope="module")
def folder(world: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world and rows, made by the recipe's own commands."""
    folder = tmp_path_factory.mktemp("multi_tool")
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    world.main(folder / "world", SIZE, SIZE, seed=1)
    convert = load_script("multi_tool_data", EXAMPLES / "data_preprocess" / "multi_tool.py").main
    convert(str(folder / "world" / "questions"), folder / "data", tool=True, system="")
    return folder


@pytest.fixture(scope="module")
def splits(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        split: pd.read_parquet(folder / "data" / f"{split}.parquet").to_dict("records") for split in ("train", "test")
    }


@pytest.fixture(scope="module")
def warmup() -> ModuleType:
    return load_script("multi_tool_warmup", RECIPE / "warmup.py")


Asked = dict[tuple[int, str], str]


@pytest.fixture(scope="module")
def answers(warmup: ModuleType, folder: Path, splits: dict[str, list[dict[str, Any]]]) -> Asked:
    """What the warm-up's last turn says if a row's question is asked of a tool, by both."""
    world = folder / "world"
    config = ToolConfig.parse(
        {
            "tools": {
                "python_code": {"workers": 1},
                "search_retrieval": {"index": str(world / "index"), "topk": 1},
                "sql": {"root": str(world / "databases"), "workers": 1},
            }
        }
    )

    async def asked() -> Asked:
        found = {}
        async with InProcessTools(load_tools("calculator,python_code,search_retrieval,sql", config)) as tools:
            for tool in TOOLS:
                lessons = await warmup.lessons(splits["test"], [tool] * SIZE, tools)
                found |= {(i, tool): lesson.traces[0][-1].text for i, lesson in enumerate(lessons)}
        return found

    return asyncio.run(asked())


def test_only_the_right_tool_knows_the_answer(answers: Asked, splits: dict[str, list[dict[str, Any]]]) -> None:
    for i, row in enumerate(splits["test"]):
        truth = row["reward_model"]["ground_truth"]
        right = f"<answer> {json.loads(truth)[0]}</answer>" if row["ability"] == "search" else f"\\boxed{{{truth}}}"
        for tool in TOOLS:
            given = answers[i, tool].removesuffix("<|im_end|>")
            assert (given == right) == (tool == row["ability"]), (row["extra_info"]["question"], tool, given)


def test_no_held_out_question_is_trained_on(world: ModuleType) -> None:
    def asked(held_out: frozenset[Any]) -> set[Any]:
        return {task.problem for task in drawn.tasks("train", 160, held_out, random.Random(1))}

    drawn = world.World(0)
    held_out = frozenset(task.problem for task in drawn.tasks("test", 160, frozenset(), random.Random(0)))
    assert len(held_out) == len(asked(held_out)) == 160
    assert not asked(held_out) & held_out
    assert asked(frozenset()) & held_out, "so few questions are drawn that none would be drawn twice by chance"


def test_a_question_is_the_same_in_the_other_order(world: ModuleType) -> None:
    tasks = [world.Task(tool, thing, "", "") for tool in ("calculator", "python") for thing in ("30 + 12", "12 + 30")]
    assert len({task.problem for task in tasks}) == 2


def test_kinds_are_as_many_in_each_split_and_databases_are_in_one(splits: dict[str, list[dict[str, Any]]]) -> None:
    def databases(split: str) -> set[str]:
        return {row["extra_info"]["tools_kwargs"]["db_id"] for row in splits[split]}

    assert not databases("train") & databases("test")
    for rows in splits.values():
        assert [sum(row["ability"] == tool for row in rows) for tool in TOOLS] == [SIZE // 4] * 4
        assert {row["data_source"] for row in rows} == {f"multi_tool_{tool}" for tool in TOOLS}


def test_most_examples_ask_a_wrong_tool(warmup: ModuleType) -> None:
    rng = random.Random(0)
    drawn = [warmup.drawn("python", rng) for _ in range(1000)]
    assert 250 < drawn.count("python") < 350
    assert 350 < drawn.count("calculator") < 450


def test_the_table_tells_which_tool_was_asked(tmp_path: Path, splits: dict[str, list[dict[str, Any]]]) -> None:
    report = load_script("multi_tool_tools_by_kind", RECIPE / "tools_by_kind.py")
    kinds = [row["ability"] for row in splits["test"]]
    index = kinds.index("sql")
    called = Trajectory(
        *("a", (), StopReason.ANSWERED),
        calls=(CallRecord(0, "<search>bear</search>", names=("search_retrieval",)),),
        extra={"index": index, "reward_extra_info": {"acc": 1.0}},
    )
    path = tmp_path / "validation_0.jsonl"
    path.write_text("".join(f"{each.to_json()}\n" for each in (called, replace(called, calls=()))))
    asked, right = report.counted(path, kinds)
    assert asked == {"sql": {"search": 1, "none": 1}}
    assert right == {"sql": [1.0, 1.0]}
