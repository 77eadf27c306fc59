"""The rows of one run, from the data set that `examples/data_preprocess/calculator.py` made.

    python examples/train/calculator/rows_for_run.py --data data/calculator --out outputs/calculator/grpo/data

Adds the held-out problems once more without the tool, and on wish two solved problems before each question, for a model
that was not warmed up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

WITHOUT_TOOL = "calculator_without_tool"
FEW_SHOT = """\
Answer with the calculator: write a request, wait for its response, then submit the result.

What is 13.1-3?
<request><SimpleCalculatorTool>13.1-3<call>10.1<response>Result=10.1<submit>

What is 4.5*2.1?
<request><SimpleCalculatorTool>4.5*2.1<call>9.45<response>Result=9.45<submit>

"""


def with_examples(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose question stands behind two solved problems."""

    def lengthened(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        *before, question = messages
        return [*before, {**question, "content": FEW_SHOT + question["content"]}]

    return rows.assign(prompt=rows["prompt"].map(lengthened))


def without_tool(rows: pd.DataFrame) -> pd.DataFrame:
    """The same problems, to be answered in one turn."""
    return rows.assign(data_source=WITHOUT_TOOL, use_tool=False)


def main(
    data: Annotated[Path, typer.Option(help="Folder with train.parquet and test.parquet.")],
    out: Annotated[Path, typer.Option(help="Folder for train, test and without_tool.")],
    few_shot: Annotated[bool, typer.Option(help="Put two solved problems before each question.")] = False,
) -> None:
    """Write the three files."""
    out.mkdir(parents=True, exist_ok=True)
    train, test = (pd.read_parquet(data / f"{split}.parquet") for split in ("train", "test"))
    if few_shot:
        train, test = with_examples(train), with_examples(test)
    for name, rows in (("train", train), ("test", test), ("without_tool", without_tool(test))):
        rows.to_parquet(out / f"{name}.parquet")


if __name__ == "__main__":
    typer.run(main)
