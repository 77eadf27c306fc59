"""Questions of several kinds, each for another tool, for the reward manager `by_source`.

    python examples/train/multi_tool/tool_world.py --output data/multi_tool/world
    python examples/data_preprocess/multi_tool.py --dataset_path data/multi_tool/world/questions

A row's `ability` is the tool that answers it, as the reward manager needs it; the model is not told. Its `data_source`
tells it too, so that validation has a score for each kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import DatasetPath, LocalDir, Row, convert, field, load, messages, row, run, save

DATA_SOURCE = "multi_tool"
SEARCH = "search"
TOOL = """\
Answer the question. A tool helps: calculator, search (of pages about people), sql (the table animals with name and
kilos), or python. Give a number as \\boxed{7}, anything else as <answer>Paris</answer>."""
NO_TOOL = "Answer the question. Give a number as \\boxed{7}, anything else as <answer>Paris</answer>."


def as_row(source: Mapping[str, Any], split: str, index: int, system: str) -> Row:
    """One question."""
    tool, question, answer = (field(source, name, index) for name in ("tool", "question", "answer"))
    extra = {"question": question, "thing": source["thing"], "tools_kwargs": {"db_id": field(source, "db_id", index)}}
    golden = json.dumps([answer]) if tool == SEARCH else answer
    prompt = messages(system or None, question)
    return row(f"{DATA_SOURCE}_{tool}", prompt, tool, golden, split, index, extra, system != NO_TOOL)


def main(
    dataset_path: DatasetPath = "data/multi_tool/world/questions",
    local_dir: LocalDir = Path("data/multi_tool"),
    tool: Annotated[bool, typer.Option(help="Tell the model of the tools, and let it use them.")] = True,
    system: Annotated[str | None, typer.Option("--system", help="Another system message; empty: none.")] = None,
) -> None:
    """Make the data set of the recipe multi_tool."""
    told = (TOOL if system is None else system) if tool else NO_TOOL
    splits = {split: load(dataset_path, split) for split in ("train", "test")}
    save(convert(splits, lambda source, split, i: as_row(source, split, i, told)), local_dir)


if __name__ == "__main__":
    run(main)
