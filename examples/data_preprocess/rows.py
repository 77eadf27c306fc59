"""Rows as verl reads them, and how they are saved.

A row has `data_source`, `prompt` (a list of `{role, content}`), `ability`, `reward_model` (`style`, `ground_truth`) and
`extra_info` (`split`, `index`, and what the source adds), plus `agent_name` and `use_tool`, which verl-tool reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console


def row(
    data_source: str,
    messages: Sequence[Mapping[str, str]],
    ability: str,
    ground_truth: str,
    split: str,
    index: int,
    extra_info: Mapping[str, Any] | None = None,
    use_tool: bool = True,
) -> dict[str, Any]:
    """One row. `ground_truth` stays with the trainer: it is never sent to a tool."""
    return {
        "data_source": data_source,
        "prompt": [dict(message) for message in messages],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **(extra_info or {})},
        "agent_name": "verl_tool",
        "use_tool": use_tool,
    }


def save(splits: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> dict[str, Path]:
    """Write ``<folder>/<split>.parquet`` for each split; print the counts and one example. Returns the paths.

    Raises ValueError if a split is empty.
    """
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"split {split!r} has no rows; nothing was written for it")
        paths[split] = folder / f"{split}.parquet"
        pd.DataFrame(list(rows)).to_parquet(paths[split])
        console.print(f"{split}: {len(rows)} rows -> {paths[split]}")
    first = next(iter(splits.values()))[0]
    console.print("one example:", json.dumps(first, indent=2, default=str), highlight=False, markup=False)
    return paths
