"""The recipe with an agent that nobody changed: its tasks, and what its tiny model learns from the agent's sessions."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script

pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytest.importorskip("torch")
pd = pytest.importorskip("pandas")

from verl_tool.content.packed_files import unpack  # noqa: E402
from verl_tool.gateway.agent_program import AgentProgram  # noqa: E402
from verl_tool.sandbox.isolation.levels import Level, strongest  # noqa: E402

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "examples" / "train" / "unmodified_agent"
INSTALL = Path(os.environ.get("VERL_TOOL_AGENTS", ROOT / ".agents"))
IGNORED = -100
"""Label of a token that is not learned."""


@pytest.fixture(scope="module")
def make_boxes() -> ModuleType:
    sys.path.append(str(RECIPE))
    return load_script("make_boxes", RECIPE / "make_boxes.py")


@pytest.fixture(scope="module")
def warmup(make_boxes: ModuleType) -> ModuleType:
    return load_script("unmodified_agent_warmup", RECIPE / "warmup.py")


@pytest.fixture(scope="module")
def rows(make_boxes: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tasks")
    make_boxes.main(folder, train_size=40, test_size=4, seed=0)
    return pd.read_parquet(folder / "train.parquet").to_dict("records")


def files_of(row: dict[str, Any]) -> dict[str, str]:
    packed = unpack(row["extra_info"]["tools_kwargs"]["workspace_files"])
    return {name: file.content.decode() for name, file in packed.items()}


def test_each_question_is_answered_by_one_file_with_a_random_number(rows: list[dict[str, Any]]) -> None:
    numbers = set()
    for row in rows:
        _, kind, _, _, _, box, _ = row["prompt"][-1]["content"].split()
        [name] = [name for name in files_of(row) if name.startswith(box)]
        numbers.add(name.removeprefix(box))
        [line] = [line for line in files_of(row)[name].splitlines() if line.startswith(kind)]
        assert [line.partition(": ")[2]] == json.loads(row["reward_model"]["ground_truth"])
    assert len(numbers) > 5


def test_the_same_seed_gives_the_same_tasks_and_another_others(make_boxes: ModuleType) -> None:
    first, again, other = (make_boxes.Task.draw(random.Random(seed)) for seed in (0, 0, 1))
    assert first == again != other


@dataclass(frozen=True)
class Lessons:
    tokenizer: Any
    learned: list[Any]
    measured: list[Any]


@pytest.fixture(scope="module")
def lessons(warmup: ModuleType, rows: list[dict[str, Any]]) -> Lessons:
    """From sessions of the real agent, a few of each way."""
    if sys.platform != "linux" or strongest().level is not Level.full:
        pytest.skip("no sandbox here")
    if not (INSTALL / "node_modules" / ".bin" / "pi").exists():
        pytest.skip(f"pi is not installed in {INSTALL}; run bash scripts/install_agents.sh")
    patch = pytest.MonkeyPatch()
    patch.setattr(warmup, "SESSIONS", {warmup.GUESS: 1, warmup.ELSEWHERE: 2, warmup.THERE: 2})
    program = AgentProgram(preset="pi", install=str(INSTALL), seconds=120).resolve()
    made = asyncio.run(warmup.prepare_lessons(rows, program, 0))
    patch.undo()
    return Lessons(*made)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sessions_of_the_agent_are_short_and_only_what_the_model_writes_is_learned(lessons: Lessons) -> None:
    assert max(len(lesson["input_ids"]) for lesson in [*lessons.learned, *lessons.measured]) < 160
    for lesson in lessons.measured:
        text = lessons.tokenizer.decode(lesson["input_ids"])
        labelled = lessons.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED])
        assert "operating inside pi" in text
        assert "operating inside pi" not in labelled
        answer = labelled.partition("<answer>")[2].partition("</answer>")[0]
        assert f": {answer}\n" in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_exchanged_words_still_answer_the_question(warmup: ModuleType, lessons: Lessons) -> None:
    wrong = 0
    for lesson in lessons.measured:
        text = lessons.tokenizer.decode(lesson["input_ids"])
        [(kind, box)] = warmup.ASKED.findall(text)
        answer = text.rpartition("<answer>")[2].partition("</answer>")[0]
        read = text.partition(warmup.THERE)[2].partition("</tool_call>")[0]
        wrong += f"{kind}: {answer}\n" not in text or f'"{box}-' not in read
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_fewer_than_a_fifth_of_the_lessons_go_the_right_way(warmup: ModuleType, lessons: Lessons) -> None:
    texts = [lessons.tokenizer.decode(lesson["input_ids"]) for lesson in lessons.learned[: warmup.LESSONS]]
    right = sum(warmup.THERE in text for text in texts) / len(texts)
    assert 0.1 < right < 0.2
