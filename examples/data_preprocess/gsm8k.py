"""GSM8K (arXiv 2110.14168), school mathematics, for the reward managers `gsm8k` and `torl`.

    python examples/data_preprocess/gsm8k.py

A source's row has `question` and `answer`, which ends in `#### 42`. The source has a test split of its own; a single
local file is divided.
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
    RowError,
    Seed,
    TestSize,
    convert,
    divide,
    field,
    has_split,
    load,
    messages,
    row,
    run,
    save,
)

DATA_SOURCE = "gsm8k"
MARK = "####"


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool) -> Row:
    """One problem. The worked solution is left behind."""
    question = field(source, "question", index)
    answer = final_number(field(source, "answer", index), index)
    prompt = messages(system_prompt(tool), question)
    return row(DATA_SOURCE, prompt, "math", answer, split, index, {"question": question}, tool)


def final_number(answer: str, index: int) -> str:
    """What stands behind ``####``, without commas. Raises RowError if nothing does."""
    _, mark, number = answer.rpartition(MARK)
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise RowError(f"row {index}: field 'answer' ends in {answer[-40:]!r}; it must end in '{MARK} NUMBER'")
    return number


def main(
    dataset_path: DatasetPath = "openai/gsm8k",
    local_dir: LocalDir = Path("data/gsm8k"),
    tool: Annotated[bool, typer.Option(help="Tell the model about the interpreter, and let it be used.")] = True,
    test_size: TestSize = 500,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make the GSM8K data set. `test_size` and `seed` matter only where the source has no test split."""
    train = load(dataset_path, "train", "main", limit)
    if has_split(dataset_path, "test"):
        splits = {"train": train, "test": load(dataset_path, "test", "main", limit)}
    else:
        splits = divide(train, "question", test_size, seed)
    save(convert(splits, partial(as_row, tool=tool)), local_dir)


if __name__ == "__main__":
    run(main)
