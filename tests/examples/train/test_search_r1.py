"""The recipe that searches: the world of its small form, and what its tiny model learns from."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script
from small_corpus import build_index
from toy_model import ScriptedEngine, ToyTokenizer, turns_of

pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("verl")
pd = pytest.importorskip("pandas")

from omegaconf import OmegaConf  # noqa: E402

from verl_tool.agent_loop.episode import Episode  # noqa: E402
from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.agent_loop.trajectory import StopReason  # noqa: E402
from verl_tool.agent_workers.reward_manager.grading.answers import last_tagged  # noqa: E402
from verl_tool.retrieval.index import Index  # noqa: E402
from verl_tool.retrieval.manifest import Kind  # noqa: E402
from verl_tool.servers.execution.in_process import InProcessTools  # noqa: E402
from verl_tool.servers.tool_config import ToolConfig  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = EXAMPLES / "train" / "search_r1"
OPTIONS = {"action_stop_tokens": ["</search>", "</answer>"], "max_turns": 3, "max_obs_length": 1000}
END = "<|im_end|>"
IGNORED = -100
"""Label of a token that is not learned."""


@pytest.fixture(scope="module")
def make_world() -> ModuleType:
    return load_script("make_world", RECIPE / "make_world.py")


@pytest.fixture(scope="module")
def warmup(make_world: ModuleType) -> ModuleType:
    sys.path.append(str(RECIPE))
    return load_script("search_r1_warmup", RECIPE / "warmup.py")


@pytest.fixture(scope="module")
def world(make_world: ModuleType) -> Any:
    return make_world.World.drawn(0, 3200, 256)


@pytest.fixture(scope="module")
def made(make_world: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data as the recipe's commands make it, of the same world."""
    folder = tmp_path_factory.mktemp("search_r1")
    make_world.main(folder / "world", train_size=3200, test_size=256, seed=0)
    build_index(folder / "world" / "corpus.jsonl", folder / "world" / "index", Kind.bm25)
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    load_script("search_r1_data", EXAMPLES / "data_preprocess" / "search_r1.py").main(
        *(str(folder / "world" / "questions"), folder),
        **{"tool": True, "instructions": False, "without_tool": True, "test_size": 0, "seed": 0, "limit": None},
    )
    return folder


def tool_config(made: Path) -> ToolConfig:
    """Of the tools, as the recipe's small form has it."""
    parts = [OmegaConf.load(RECIPE / f"{profile}.yaml").recipe for profile in ("gpu", "cpu")]
    config = OmegaConf.merge(*({"recipe": part} for part in parts), {"recipe": {"tool_data": f"{made}/world"}})
    return ToolConfig.from_cli(config.recipe.tool_config)


def rows(made: Path, split: str = "train") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pd.read_parquet(made / f"{split}.parquet").to_dict("records")
    return found


def test_no_page_that_answers_a_held_out_question_answers_one_to_train_on(world: Any, make_world: ModuleType) -> None:
    def read(split: str) -> set[str]:
        return {page.name for question in world.questions[split] for page in question.pages(world.pages)}

    assert not read("train") & read("test")
    assert len(world.pages) == make_world.PEOPLE == 2000
    assert len(set(make_world.WORDS)) == len(make_world.WORDS)
    assert world == make_world.World.drawn(0, 3200, 256) != make_world.World.drawn(1, 3200, 256)
    with pytest.raises(ValueError, match="need 2049 people, and there are 256"):
        make_world.World.drawn(0, 8, 2049 * 4)


def test_every_kind_is_asked_as_often_and_no_answer_is_worth_a_guess(world: Any, make_world: ModuleType) -> None:
    for split, size in (("train", 3200), ("test", 256)):
        asked = world.questions[split]
        assert len({question.text for question in asked}) == len(asked) == size
        assert Counter(question.path for question in asked) == dict.fromkeys(make_world.KINDS, size // 4)
        answers = Counter(question.answer(world.pages) for question in asked)
        assert max(answers.values()) < 0.05 * size
    two_hops = [question for question in world.questions["test"] if len(question.path) == 2]
    first_pages = [getattr(world.pages[question.person], question.path[-1]) for question in two_hops]
    same = sum(first == question.answer(world.pages) for first, question in zip(first_pages, two_hops, strict=True))
    assert same < 0.1 * len(two_hops), "the second search would not be needed"


def test_a_name_finds_its_own_page(world: Any, made: Path) -> None:
    index = Index(made / "world" / "index")
    found = index.search(list(world.pages), 1)
    assert [index.passage(hits[0].number).title for hits in found] == list(world.pages)


def test_a_page_and_a_row_tell_all_that_they_were_made_from(world: Any, made: Path, make_world: ModuleType) -> None:
    for page in list(world.pages.values())[:20]:
        assert make_world.Person.on(page.contents) == page
    with pytest.raises(ValueError, match="the page of nobody"):
        make_world.Person.on("No passage was found for this query.")
    for split in ("train", "test"):
        for row, question in zip(rows(made, split), world.questions[split], strict=True):
            assert make_world.Question.of(row["extra_info"]["id"]) == question
            assert [dict(message) for message in row["prompt"]] == [{"role": "user", "content": question.text}]
            assert json.loads(row["reward_model"]["ground_truth"]) == [question.answer(world.pages)]
    test, without = rows(made, "test"), rows(made, "without_tool")
    assert [row["reward_model"] for row in without] == [row["reward_model"] for row in test]
    assert [row["use_tool"] for row in test + without] == [True] * 256 + [False] * 256
    assert {row["data_source"] for row in test} == {"one_hop", "two_hop"}
    assert {row["data_source"] for row in without} == {"without_tool"}


async def test_the_examples_are_what_the_loop_makes_with_the_real_tool(
    warmup: ModuleType, world: Any, made: Path
) -> None:
    tokenizer, rng = ToyTokenizer(), random.Random(0)
    tools = load_tools(warmup.TOOLS, tool_config(made))
    async with InProcessTools(tools) as running:
        reader = warmup.Reader(running)
        for index, question in enumerate(world.questions["train"][:16]):
            for habit in warmup.HABITS[len(question.path)]:
                trace = await warmup.trace_of(question, habit, reader, rng)
                episode = Episode(
                    ScriptedEngine(tokenizer, turns_of(trace)), running, tokenizer, EpisodeOptions.load(OPTIONS)
                )
                trajectory = await episode.run(tokenizer.encode(question.text), trajectory_id=f"{index}-{habit}")
                text = tokenizer.decode(trajectory.response_ids)
                assert text + END == "".join(part.text for part in trace)
                assert trajectory.stop is StopReason.TOOL_DONE
                assert text.count("<search>") == {"guess": 0, "first page": 1}.get(habit, len(question.path))
                if habit == "right":
                    assert (last_tagged(text, "answer") or "").strip() == question.answer(world.pages)


@pytest.fixture(scope="module")
def lessons(warmup: ModuleType, made: Path) -> tuple[list[Any], list[Any]]:
    found: tuple[list[Any], list[Any]] = asyncio.run(warmup.lessons(rows(made), tool_config(made), random.Random(0)))
    return found


def test_most_examples_do_not_search_as_far_as_they_must(
    warmup: ModuleType, world: Any, lessons: tuple[list[Any], list[Any]]
) -> None:
    taught, measured = lessons
    asked = world.questions["train"]
    for hops, (least, most) in {1: (0.2, 0.35), 2: (0.1, 0.25)}.items():
        right = [
            (last_tagged(text_of(lesson), "answer") or "").strip() == question.answer(world.pages)
            for lesson, question in zip(taught, asked, strict=True)
            if len(question.path) == hops
        ]
        assert least < sum(right) / len(right) < most
    for lesson, question in zip(measured, asked, strict=False):
        assert text_of(lesson).endswith(f"<answer> {question.answer(world.pages)}</answer>{END}")


def text_of(lesson: Any) -> str:
    return "".join(part.text for part in lesson.traces[0])


def test_words_are_single_tokens_and_observations_are_not_learned(
    warmup: ModuleType, world: Any, lessons: tuple[list[Any], list[Any]]
) -> None:
    taught, measured = lessons
    tokenizer, small = warmup.tokenizer_of(taught[:300]), OmegaConf.load(RECIPE / "cpu.yaml")
    for words in (*list(world.pages)[:5], " ".join(warmup.WORDS[-5:])):
        assert len(tokenizer.encode(f" {words}", add_special_tokens=False)) == len(words.split())
    for lesson in [*taught[:50], *measured[:20]]:
        [row] = warmup.encode_lesson(tokenizer, lesson, warmup.learned)
        assert tokenizer.decode(row["input_ids"]).endswith(text_of(lesson))
        assert len(row["input_ids"]) <= 96
        shown = [tokenizer.encode(part.text, add_special_tokens=False) for part in lesson.traces[0] if not part.learned]
        assert all(len(observation) <= small.actor_rollout_ref.agent.max_obs_length for observation in shown)
        told = tokenizer.decode([token for token in row["labels"] if token != IGNORED])
        assert told == "".join(part.text for part in lesson.traces[0] if part.learned)
        assert "information" not in told
