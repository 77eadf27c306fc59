"""AIME 2024 as a test set, for the reward manager `torl`, and on wish the years before it to train on.

    python examples/data_preprocess/aime.py
    python examples/data_preprocess/aime.py --train_path gneubig/aime-1983-2024

A source's row has `ID`, `Problem` or `Question`, and `Answer`, a whole number from 0 to 999. Rows to train on may have
`Year`: those of the test's year are left out. So is a row whose answer is no such number, and a line tells which; a row
without one of the fields is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from math_prompts import system_prompt
from rich.console import Console
from rows import DatasetPath, Limit, LocalDir, Row, RowError, convert, field, load, messages, row, run, save

DATA_SOURCES = {"train": "aime", "test": "aime_2024"}
TEST_YEAR = 2024


def as_row(source: Mapping[str, Any], split: str, index: int, tool: bool) -> Row:
    """One problem."""
    problem = field(source, "Question" if "Question" in source else "Problem", index)
    answer = str(int(_answer(source, index)))
    extra = {"question": problem, "id": str(source.get("ID", ""))}
    prompt = messages(system_prompt(tool), problem)
    return row(DATA_SOURCES[split], prompt, "math", answer, split, index, extra, tool)


def with_numbers(source: Iterable[Mapping[str, Any]], split: str, console: Console) -> list[Mapping[str, Any]]:
    """The rows whose answer is a whole number from 0 to 999; prints the others. Raises RowError if none is left."""
    rows = list(source)
    wrong = [(i, row) for i, row in enumerate(rows) if not _is_number(_answer(row, i))]
    if not wrong:
        return rows
    told = ", ".join(f"{row.get('ID') or f'row {i}'} ({_answer(row, i)!r:.40})" for i, row in wrong)
    of = f"{len(wrong)} of {len(rows)} rows for {split}"
    if len(wrong) == len(rows):
        raise RowError(f"{of}: field 'Answer' must be a whole number from 0 to 999: {told[:300]}")
    console.print(f"left out {of}, whose 'Answer' is no whole number from 0 to 999: {told}", markup=False)
    places = {i for i, _ in wrong}
    return [row for i, row in enumerate(rows) if i not in places]


def _answer(source: Mapping[str, Any], index: int) -> str:
    return str(field(source, "Answer", index, int, str)).strip()


def _is_number(answer: str) -> bool:
    return answer.isascii() and answer.isdigit() and int(answer) < 1000


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
    console = Console()
    splits = {split: with_numbers(rows, split, console) for split, rows in splits.items()}
    save(convert(splits, partial(as_row, tool=tool)), local_dir)


if __name__ == "__main__":
    run(main)
