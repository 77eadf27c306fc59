"""DeepMath-103K (arXiv 2504.11456), hard problems with short answers, for the reward manager `torl`.

    python examples/data_preprocess/deepmath.py --min_difficulty 5

A source's row has `question`, `final_answer`, `difficulty` (-1 to 10), `topic` and three solutions, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from math_prompts import system_prompt
from rows import (
    DatasetPath,
    Limit,
    LocalDir,
    Row,
    Seed,
    TestSize,
    convert,
    divide,
    field,
    load,
    messages,
    row,
    run,
    save,
)

DATA_SOURCE = "deepmath"
FIELDS = ("question", "final_answer", "difficulty", "topic")


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool) -> Row:
    """One problem."""
    question = field(source, "question", index)
    answer = field(source, "final_answer", index)
    extra = {
        "question": question,
        "difficulty": float(source.get("difficulty") or 0),
        "topic": str(source.get("topic") or ""),
    }
    return row(DATA_SOURCE, messages(system_prompt(tool), question), "math", answer, split, index, extra, tool)


def main(
    dataset_path: DatasetPath = "zwhe99/DeepMath-103K",
    local_dir: LocalDir = Path("data/deepmath"),
    tool: Annotated[bool, typer.Option(help="Tell the model about the interpreter, and let it be used.")] = True,
    min_difficulty: Annotated[float, typer.Option("--min_difficulty", help="Leave easier problems out.")] = -1.0,
    test_size: TestSize = 500,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make the DeepMath data set."""
    source = load(dataset_path, limit=limit)
    source = source.select_columns([column for column in source.column_names if column in FIELDS])
    if min_difficulty > -1:
        hard = [i for i, entry in enumerate(source) if field(entry, "difficulty", i, int, float) >= min_difficulty]
        source = source.select(hard)
    splits = divide(source, "question", test_size, seed)
    save(convert(splits, partial(as_row, tool=tool)), local_dir)


if __name__ == "__main__":
    run(main)
