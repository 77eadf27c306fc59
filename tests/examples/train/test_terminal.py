"""The recipe with a shell: the tasks of its small form, and what its tiny model learns from."""

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
from verl_tool.servers.execution.in_process import InProcessTools  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402
from verl_tool.verification import verification_of  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
TURNS = 3


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    return load_script("terminal_traces", EXAMPLES / "train" / "traces.py")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Made and converted by the recipe's own commands."""
    folder = tmp_path_factory.mktemp("terminal")
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    load_script("terminal_make_tasks", EXAMPLES / "train" / "terminal" / "make_tasks.py").main(folder / "tasks", 40, 1)
    convert = load_script("terminal_data", EXAMPLES / "data_preprocess" / "terminal_tasks.py").main
    convert(folder / "tasks", folder / "data", test_size=10, seed=0, system="", ignore_build=False)
    splits = [pd.read_parquet(folder / "data" / f"{split}.parquet").to_dict("records") for split in ("train", "test")]
    assert [len(split) for split in splits] == [30, 10]
    return splits[0]


async def test_the_examples_are_what_the_loop_makes_with_the_real_shell(
    traces: ModuleType, rows: list[dict[str, Any]]
) -> None:
    tokenizer = ToyTokenizer()
    options = EpisodeOptions.load(
        {
            **{"action_stop_tokens": ["</bash>"], "max_turns": TURNS, "force_finish_for_last_turn": True},
            **{"max_obs_length": 1000, "tool_call_timeout": 60},
        }
    )
    tools = load_tools("bash_terminal", shared={"workers": 1, "warm_modules": ()})
    async with InProcessTools(tools) as shell:
        for index, row in enumerate(rows[:2]):
            ways = traces.traces_of(row)
            for which, reward in ((0, 0.0), (len(ways) - 1, 1.0)):
                turns = turns_of(ways[which])
                assert len(turns) == TURNS
                episode = Episode(ScriptedEngine(tokenizer, turns), shell, tokenizer, options)
                trajectory = await episode.run(
                    tokenizer.encode(row["prompt"][-1]["content"]),
                    trajectory_id=f"{index}-{which}",
                    extra=row["extra_info"]["tools_kwargs"],
                    verification=verification_of(row["reward_model"], "a row"),
                )
                told = tokenizer.decode(trajectory.response_ids)
                assert told.startswith("".join(part.text for part in ways[which]))
                assert trajectory.verdict is not None
                assert trajectory.verdict.reward == reward, trajectory.verdict.told


def test_most_examples_read_a_wrong_file_and_other_questions_have_none(
    traces: ModuleType, rows: list[dict[str, Any]]
) -> None:
    [*others, right] = traces.traces_of(rows[0])
    assert 0.3 < sum(trace == right for trace in [*others, right]) / 20 < 0.45
    assert len({str(trace) for trace in others}) == 2
    assert traces.traces_of({**rows[0], "prompt": [{"role": "user", "content": "Repair it."}]}) == []
