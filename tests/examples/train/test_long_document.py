"""The recipe with documents longer than the window: its tool, its data, and what its tiny model learns from."""

from __future__ import annotations

import asyncio
import json
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

from verl_tool.agent_workers.reward_manager.grading.answers import last_tagged  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.servers.execution.in_process import InProcessTools  # noqa: E402
from verl_tool.servers.tool_config import ToolConfig  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = EXAMPLES / "train" / "long_document"
READ = "<read>{}</read>"
IGNORED = -100
"""Label of a token that is not learned."""


@pytest.fixture(scope="module")
def data() -> ModuleType:
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    return load_script("long_document_data", EXAMPLES / "data_preprocess" / "long_document.py")


@pytest.fixture(scope="module")
def warmup() -> ModuleType:
    sys.path.append(str(RECIPE))
    return load_script("long_document_warmup", RECIPE / "warmup.py")


@dataclass(frozen=True)
class Made:
    """Data as the recipe's commands make it, and what the warm-up makes of it."""

    documents: Path
    rows: list[dict[str, Any]]
    tokenizer: Any
    learned: list[Any]
    measured: list[Any]


@pytest.fixture(scope="module")
def made(data: ModuleType, warmup: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("long_document")
    documents = folder / "documents"
    make_documents = load_script("make_documents", RECIPE / "make_documents.py")
    make_documents.main(folder / "source", train_size=160, test_size=8, pages=5, seed=0)
    files = (folder / "source" / f"{split}.jsonl" for split in ("train", "test"))
    data.main(*files, documents, folder, page_characters=120, instructions=False, limit=None)
    rows = pd.read_parquet(folder / "train.parquet").to_dict("records")
    return Made(documents, rows, *asyncio.run(warmup.prepare_lessons(rows, documents, 0)))


def tools_of(documents: Path) -> InProcessTools:
    file = str(RECIPE / "read.py")
    config = ToolConfig.from_cli(json.dumps({"tools": [{"name": file, "folder": str(documents)}]}))
    return InProcessTools(load_tools(file, config))


async def test_the_tool_reads_a_document_page_by_page(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("Once.\fAnd then.", encoding="utf-8")
    async with tools_of(tmp_path) as tools:
        read = [
            (await tools.call("one", READ, step=step, extra={"document": "story"})).observation for step in range(4)
        ]
        other = (await tools.call("two", READ, step=0, extra={"document": "story"})).observation
    assert "This is page 1 of 2.\nOnce." in read[0]
    assert "This is page 2 of 2.\nAnd then." in read[1]
    assert all("There are no more pages." in text for text in read[2:])
    assert other == read[0]


@pytest.mark.parametrize("name", ["", "none", "../secret", "link"])
async def test_only_documents_of_the_folder_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    async with tools_of(folder) as tools:
        result = await tools.call("one", READ, step=0, extra={"document": name})
    assert result.fault is not None
    assert result.fault.kind == "misconfigured"
    assert str(folder) in result.fault.message


def test_a_folder_that_is_missing_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder"):
        tools_of(tmp_path / "none")


def test_pages_end_between_paragraphs_and_lose_nothing(data: ModuleType) -> None:
    text = "\n\n".join(["a" * 30, "b" * 30, "c" * 150, "d" * 5])
    pages = list(data.split_pages(text, 65))
    assert [len(page) for page in pages] == [62, 65, 65, 27]
    assert "".join(pages).replace("\n", "") == text.replace("\n", "")
    assert list(data.split_pages("", 65)) == []


def test_a_file_that_is_missing_is_named_with_how_to_get_it(data: ModuleType, tmp_path: Path) -> None:
    missing = tmp_path / "hotpotqa_train_32k.parquet"
    with pytest.raises(FileNotFoundError, match="hf download BytedTsinghua-SIA/hotpotqa"):
        data.main(missing, missing, tmp_path, tmp_path, page_characters=10, instructions=True, limit=None)


def test_a_question_is_answered_by_its_document(made: Made) -> None:
    for row in made.rows:
        pages = (made.documents / f"{row['extra_info']['tools_kwargs']['document']}.txt").read_text().split("\f")
        assert len(pages) == row["extra_info"]["pages"] == 5
        words = row["extra_info"]["question"].rstrip("?").replace(",", "").split()
        asked = [(words[1], int(words[5])), (words[8], int(words[11]))]
        [answer] = json.loads(row["reward_model"]["ground_truth"])
        for line, (kind, page) in zip(answer.split(", "), asked, strict=True):
            assert line.startswith(kind)
            assert f"- {line}" in pages[page - 1]
        assert asked[0][1] < asked[1][1] > 2


def test_rows_of_the_lessons_are_those_of_the_loop_within_its_window(made: Made) -> None:
    texts = [made.tokenizer.decode(lesson["input_ids"]) for lesson in made.measured]
    assert sum("<answer>" in text for text in texts) * 5 == len(texts)
    longest = max(len(lesson["input_ids"]) for lesson in [*made.learned, *made.measured])
    assert longest < 144
    for row, text in zip(made.rows, [text for text in texts if "<answer>" in text], strict=False):
        [gold] = json.loads(row["reward_model"]["ground_truth"])
        assert (last_tagged(text, "answer") or "").strip() == gold


def test_only_what_the_model_writes_is_learned(warmup: ModuleType, made: Made) -> None:
    for lesson in made.measured:
        labelled = made.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED])
        assert labelled.startswith(warmup.READ)
        assert "This is page" not in labelled
        assert warmup.KEEP not in labelled


def test_fewer_than_half_of_the_summaries_contain_all_lines(warmup: ModuleType, made: Made) -> None:
    """Where the beginning of a summary is learned; lessons in how to go on have it without a label."""
    learned = [made.tokenizer.decode([t for t in lesson["labels"] if t != IGNORED]) for lesson in made.learned]
    beginnings = [text.removeprefix(warmup.READ + "<|im_end|>").partition("\n")[0] for text in learned]
    habits = [text for text in beginnings if text in warmup.HABITS]
    assert set(habits) == set(warmup.HABITS)
    assert 0.3 < habits.count(warmup.KEEP) / len(habits) < 0.5
