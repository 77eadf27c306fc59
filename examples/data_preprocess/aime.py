"""AIME 2024 as a test set, for the reward manager `torl`.

    python examples/data_preprocess/aime.py

A source's row has `ID`, `Problem`, `Solution` (not read) and `Answer`, a whole number from 0 to 999.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from math_prompts import system_prompt
from rows import DatasetPath, Limit, LocalDir, Row, RowError, convert, field, load, messages, row, save

DATA_SOURCE = "aime_2024"


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool) -> Row:
    """One problem."""
    problem = field(source, "Problem", index)
    answer = str(field(source, "Answer", index, int, str)).strip()
    if not (answer.isascii() and answer.isdigit() and int(answer) < 1000):
        raise RowError(f"row {index}: field 'Answer' is {answer!r}; it must be a whole number from 0 to 999")
    extra = {"question": problem, "id": str(source.get("ID", ""))}
    prompt = messages(system_prompt(tool), problem)
    return row(DATA_SOURCE, prompt, "math", str(int(answer)), split, index, extra, tool)


def main(
    dataset_path: DatasetPath = "Maxwell-Jia/AIME_2024",
    local_dir: LocalDir = Path("data/aime"),
    tool: Annotated[bool, typer.Option(help="Tell the model about the interpreter, and let it be used.")] = True,
    limit: Limit = None,
) -> None:
    """Make the AIME test set: test.parquet only."""
    # Its only split is called train, and holds nothing to train on.
    save(convert({"test": load(dataset_path, limit=limit)}, partial(as_row, tool=tool)), local_dir)


if __name__ == "__main__":
    typer.run(main)
