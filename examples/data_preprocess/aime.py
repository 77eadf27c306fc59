"""AIME 2024 as a test set, for the reward manager `torl`, and on wish the years before it to train on.

    python examples/data_preprocess/aime.py
    python examples/data_preprocess/aime.py --train_path gneubig/aime-1983-2024

A source's row has `ID`, `Problem` or `Question`, and `Answer`, a whole number from 0 to 999. Rows to train on may have
`Year`: those of the test's year are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from math_prompts import system_prompt
from rows import DatasetPath, Limit, LocalDir, Row, RowError, convert, field, load, messages, row, save

DATA_SOURCES = {"train": "aime", "test": "aime_2024"}
TEST_YEAR = 2024


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool) -> Row:
    """One problem."""
    problem = field(source, "Question" if "Question" in source else "Problem", index)
    answer = str(field(source, "Answer", index, int, str)).strip()
    if not (answer.isascii() and answer.isdigit() and int(answer) < 1000):
        raise RowError(f"row {index}: field 'Answer' is {answer!r}; it must be a whole number from 0 to 999")
    extra = {"question": problem, "id": str(source.get("ID", ""))}
    prompt = messages(system_prompt(tool), problem)
    return row(DATA_SOURCES[split], prompt, "math", str(int(answer)), split, index, extra, tool)


def main(
    dataset_path: DatasetPath = "Maxwell-Jia/AIME_2024",
    local_dir: LocalDir = Path("data/aime"),
    tool: Annotated[bool, typer.Option(help="Tell the model about the interpreter, and let it be used.")] = True,
    train_path: Annotated[str | None, typer.Option("--train_path", help="Earlier years to train on.")] = None,
    limit: Limit = None,
) -> None:
    """Make the AIME test set, and train.parquet if there is a `train_path`."""
    # The only split of both sources is called train.
    splits: dict[str, Any] = {"test": load(dataset_path, limit=limit)}
    if train_path is not None:
        splits["train"] = [row for row in load(train_path, limit=limit) if row.get("Year") != TEST_YEAR]
    save(convert(splits, partial(as_row, tool=tool)), local_dir)


if __name__ == "__main__":
    typer.run(main)
