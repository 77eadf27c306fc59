"""Questions to be answered by search, as Search-R1 trains on (arXiv 2503.09516), for `search_r1_qa_em`.

    python examples/data_preprocess/search_r1.py

A source's row has `id`, `question`, `golden_answers` and `data_source` (nq, hotpotqa, …). The source has a test split
of its own, of seven data sets; a single local file is divided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import (
    WITHOUT_TOOL,
    DatasetPath,
    Limit,
    LocalDir,
    Row,
    Seed,
    TestSize,
    convert,
    divide,
    field,
    has_split,
    load,
    messages,
    row,
    rows_without_tool,
    run,
    save,
)

DATA_SOURCE = "search_r1"
FIELDS = ("id", "question", "golden_answers", "data_source")
SEARCHING = """\
Answer the question. Reason between <think> and </think> whenever you have learned something new. If you lack knowledge,
search for it: write <search>query</search>, and the best results come back between <information> and </information>.
Search as often as you like. When you know enough, give a short answer between <answer> and </answer>, without an
explanation: <answer>Beijing</answer>, for example.

Question: """
NOT_SEARCHING = """\
Answer the question. Reason between <think> and </think> first. Then give a short answer between <answer> and </answer>,
without an explanation: <answer>Beijing</answer>, for example.

Question: """


def as_row(source: Mapping[str, Any], split: str, index: int, use_tool: bool = True, instructions: bool = True) -> Row:
    """One question. `instructions`: whether the prompt tells how to answer."""
    question = field(source, "question", index).strip()
    question = question if question.endswith("?") else f"{question}?"
    answers = [str(answer) for answer in field(source, "golden_answers", index, list)]
    data_source = str(source.get("data_source") or DATA_SOURCE)
    extra = {"question": question, "id": str(source.get("id", ""))}
    told = (SEARCHING if use_tool else NOT_SEARCHING) if instructions else ""
    prompt = messages(None, told + question)
    return row(data_source, prompt, "qa", json.dumps(answers), split, index, extra, use_tool)


def main(
    dataset_path: DatasetPath = "PeterJinGo/nq_hotpotqa_train",
    local_dir: LocalDir = Path("data/search_r1"),
    tool: Annotated[bool, typer.Option(help="Let the model search, and tell it how.")] = True,
    instructions: Annotated[bool, typer.Option(" /--no_instructions", help="Give the question alone.")] = True,
    without_tool: Annotated[
        bool, typer.Option("--without_tool", help="Write the test questions once more, to be answered without search.")
    ] = False,
    test_size: TestSize = 500,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make the Search-R1 data set. `test_size` and `seed` matter only where the source has no test split."""
    train = load(dataset_path, "train", limit=limit)
    # The source's rows have verl's columns already, with prompts of their own: only the questions are taken.
    train = train.select_columns([column for column in train.column_names if column in FIELDS])
    if has_split(dataset_path, "test"):
        splits = {"train": train, "test": load(dataset_path, "test", limit=limit)}
    else:
        splits = divide(train, "question", test_size, seed)
    rows = convert(splits, partial(as_row, use_tool=tool, instructions=instructions))
    if without_tool:
        make = partial(as_row, use_tool=False, instructions=instructions)
        rows |= rows_without_tool(splits["test"], make, WITHOUT_TOOL)
    save(rows, local_dir)


if __name__ == "__main__":
    run(main)
