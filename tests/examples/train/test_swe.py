"""The recipe with issues of repositories: the projects of its small form, and what its tiny model learns from."""

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

TRAIN = Path(__file__).parents[3] / "examples" / "train"
OPTIONS = EpisodeOptions.load(
    {
        **{"action_stop_tokens": ["</bash>", "</str_replace_editor>"], "max_turns": 2},
        **{"force_finish_for_last_turn": True, "max_obs_length": 1000, "tool_call_timeout": 120},
    }
)


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    return load_script("swe_traces", TRAIN / "traces.py")


@pytest.fixture(scope="module")
def warmup() -> ModuleType:
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    sys.path.append(str(TRAIN / "swe"))
    return load_script("swe_warmup", TRAIN / "swe" / "warmup.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the recipe's own command."""
    folder = tmp_path_factory.mktemp("swe")
    sys.path.append(str(TRAIN / "swe"))
    load_script("swe_make_projects", TRAIN / "swe" / "make_projects.py").main(folder, 30, 10, seed=1)
    return folder


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, Any]]:
    splits = [pd.read_parquet(data / f"{split}.parquet").to_dict("records") for split in ("train", "test")]
    assert [len(split) for split in splits] == [30, 10]
    return [*splits[0], *splits[1]]


async def test_only_the_right_edit_passes_the_hidden_tests_in_the_sandbox(
    traces: ModuleType, rows: list[dict[str, Any]]
) -> None:
    tokenizer = ToyTokenizer()
    tools = load_tools("bash_terminal,str_replace_editor", shared={"workers": 1, "warm_modules": ()})
    async with InProcessTools(tools) as served:
        for index, row in enumerate(rows[:3]):
            ways = traces.traces_of(row)
            for which, reward in ((0, 0.0), (len(ways) - 1, 1.0)):
                episode = Episode(ScriptedEngine(tokenizer, turns_of(ways[which])), served, tokenizer, OPTIONS)
                trajectory = await episode.run(
                    tokenizer.encode(row["prompt"][-1]["content"]),
                    trajectory_id=f"{index}-{which}",
                    extra=row["extra_info"]["tools_kwargs"],
                    verification=verification_of(row["reward_model"], "a row"),
                )
                text = tokenizer.decode(trajectory.response_ids)
                assert text.startswith("".join(part.text for part in ways[which]))
                assert trajectory.verdict is not None
                assert trajectory.verdict.reward == reward, trajectory.verdict.told
                # The function of the other file is right, and stays so.
                assert trajectory.verdict.numbers["pass_to_pass"] == 1.0
                assert trajectory.verdict.numbers["tests"] == 2


def test_no_two_wrong_files_are_the_same_and_the_issue_does_not_name_the_edit(
    traces: ModuleType, rows: list[dict[str, Any]]
) -> None:
    calls_and_files = {"".join(part.text for part in traces.traces_of(row)[0][:2]) for row in rows}
    assert len(calls_and_files) == len(rows)
    for row in rows:
        assert not any(word in row["prompt"][-1]["content"] for word in ("plus", "minus", "times", "over", "return"))


def test_examples_mostly_make_the_wrong_edit_and_other_issues_have_none(
    traces: ModuleType, rows: list[dict[str, Any]]
) -> None:
    [*others, right] = traces.traces_of(rows[0])
    assert sum(trace == right for trace in [*others, right]) == 4
    assert len({str(trace) for trace in others}) == 2
    assert traces.traces_of({**rows[0], "prompt": [{"role": "user", "content": "Find it."}]}) == []


def test_a_word_is_one_token_in_lessons_that_are_what_the_loop_samples_and_sends(
    warmup: ModuleType, traces: ModuleType, data: Path, rows: list[dict[str, Any]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "MEASURED", 10)
        patch.setattr(warmup, "COPYING_LESSONS", 5)
        tokenizer, learned, measured = warmup.prepare_lessons(data / "train.parquet", 0)
    assert len(learned) == 600
    assert max(len(row["input_ids"]) for row in [*learned, *measured]) <= 80
    for row, lesson in zip(rows, measured, strict=False):
        right = traces.traces_of(row)[-1]
        written = "".join(part.text for part in right if part.learned and not part.free)
        assert tokenizer.decode([token for token in lesson["labels"] if token != -100]) == written
        assert tokenizer.decode(lesson["input_ids"]).endswith("".join(part.text for part in right))
        [operator] = [tokenizer.encode(part.text) for part in right if part.free]
        assert len(operator) == 1
