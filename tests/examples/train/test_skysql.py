"""The recipe with databases: those of its small form, and what its tiny model learns from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script
from toy_model import ScriptedEngine, ToyTokenizer, turns_of

pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")

from verl_tool.agent_loop.episode import Episode  # noqa: E402
from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.agent_loop.trajectory import StopReason  # noqa: E402
from verl_tool.servers.execution.in_process import InProcessTools  # noqa: E402
from verl_tool.servers.tool_config import ToolConfig  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402
from verl_tool.sql.executor import QueryError, SqlExecutor  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    return load_script("skysql_traces", EXAMPLES / "train" / "traces.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Databases and rows, made by the recipe's own commands."""
    folder = tmp_path_factory.mktemp("skysql")
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    make = load_script("skysql_make_databases", EXAMPLES / "train" / "skysql" / "make_databases.py").main
    make(folder, train_size=6, test_size=2, seed=1)
    convert = load_script("skysql_data", EXAMPLES / "data_preprocess" / "skysql.py").main
    given = {"test_size": 0, "seed": 0, "limit": None, "databases": None, "tool": True, "system": ""}
    convert(str(folder / "questions"), folder / "data", "test", **given)
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    """Those to train on."""
    splits = [pd.read_parquet(folder / "data" / f"{split}.parquet").to_dict("records") for split in ("train", "test")]
    assert [len(split) for split in splits] == [24, 8]
    used = [{row["extra_info"]["tools_kwargs"]["db_id"] for row in split} for split in splits]
    assert not used[0] & used[1]
    return splits[0]


async def test_the_examples_are_what_the_loop_makes_with_the_real_databases(
    traces: ModuleType, folder: Path, rows: list[dict[str, Any]]
) -> None:
    tokenizer = ToyTokenizer()
    given = {"action_stop_tokens": ["</sql>", "</solution>"], "max_turns": 2, "force_finish_for_last_turn": True}
    options = EpisodeOptions.load({**given, "max_obs_length": 1000})
    tools = load_tools("sql", ToolConfig.parse({"tools": [{"name": "sql", "root": str(folder), "workers": 1}]}))
    async with InProcessTools(tools) as sql:
        for index, row in enumerate(rows[:4]):
            for which in (0, -1):
                trace = traces.traces_of(row)[which]
                engine = ScriptedEngine(tokenizer, turns_of(trace))
                trajectory = await Episode(engine, sql, tokenizer, options).run(
                    tokenizer.encode(row["prompt"][-1]["content"]),
                    trajectory_id=f"{index}-{which}",
                    extra=row["extra_info"]["tools_kwargs"],
                )
                assert trajectory.stop is StopReason.TOOL_DONE
                assert tokenizer.decode(trajectory.response_ids) == "".join(part.text for part in trace)


async def test_only_the_right_column_gives_what_the_gold_query_gives(
    traces: ModuleType, folder: Path, rows: list[dict[str, Any]]
) -> None:
    executor = SqlExecutor(1, 5.0, 64 << 20)

    async def result(row: dict[str, Any], query: str) -> object:
        try:
            path = folder / f"{row['extra_info']['tools_kwargs']['db_id']}.sqlite"
            return (await executor.digest(path, query, "set")).digest
        except QueryError:
            return None

    try:
        for row in rows[:6]:
            gold = row["reward_model"]["ground_truth"]
            wanted = await result(row, gold)
            assert wanted is not None
            turns = [turns_of(trace)[-1] for trace in traces.traces_of(row)]
            ways = [turn.removeprefix("<solution>").removesuffix("</solution>") for turn in turns]
            right = [await result(row, query) == wanted for query in ways]
            assert right == [query == gold for query in ways]
            # Of twenty, nine look and take a wrong column, five the right one, and six guess, each another name.
            assert right[:14] == [False] * 9 + [True] * 5
            assert len(set(ways[14:])) == len(ways[14:]) == 6
            assert sum(right[14:]) <= 1
    finally:
        await executor.close()
