"""Rows of a text game: `python examples/train/text_game/make_rows.py --environment FILE.py:CLASS --output data`.

A row is the seed of an episode. Train and test have different seeds, and another `--seed` has others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from verl_tool.environments.text_game import read_rows


def main(
    environment: Annotated[str, typer.Option("--environment", help="As the tool text_game names it.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for train.parquet and test.parquet.")],
    make: Annotated[str, typer.Option("--make", help="Arguments of the environment, JSON.")] = "{}",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "Make one move.",
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Episodes to train on.")] = 1500,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out episodes.")] = 256,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Each has episodes of its own.")] = 0,
) -> None:
    """Write the two files."""
    size = train_size + test_size
    rows = list(
        read_rows(
            environment,
            count=size,
            first_seed=seed * size,
            held_out=test_size / size,
            make=json.loads(make),
            system=system,
        )
    )
    output.mkdir(parents=True, exist_ok=True)
    for row in rows:  # parquet knows no object without fields
        row["extra_info"]["tools_kwargs"]["environment"] = json.dumps(row["extra_info"]["tools_kwargs"]["environment"])
    for split in ("train", "test"):
        chosen = [row for row in rows if row["extra_info"]["split"] == split]
        pd.DataFrame(chosen).to_parquet(output / f"{split}.parquet")


if __name__ == "__main__":
    typer.run(main)
