"""What came of a run: `python examples/train/multi_tool/tools_by_kind.py outputs/multi_tool/cpu`.

Prints which tool the held-out questions of each kind were asked with, and how often they were answered, before the
training and after it; then all that `examples/train/report.py` tells of a run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import report
from tool_world import TOOLS

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.servers.tools import load_tools

NONE = "none"
"""Where a trajectory has no call."""
TAG_OF = {
    name: tag
    for tag, tool in zip(TOOLS, load_tools("calculator,search_retrieval,sql,python_code"), strict=True)
    for name in tool.call_names
}
"""By each of the names by which a model may call a tool."""


def kinds_of(run: Path) -> list[str]:
    """What each row of the validation asks for, in order."""
    files = OmegaConf.load(run / "config.yaml").data.val_files
    return [kind for file in files for kind in pd.read_parquet(file)["ability"]]


def validations(run: Path) -> list[Path]:
    """The validations' trajectories, in the order of their steps."""
    return sorted((run / "trajectories").glob("validation_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2]))


def counted(file: Path, kinds: list[str]) -> tuple[dict[str, Counter[str]], dict[str, list[float]]]:
    """By kind of question: how often each tool was asked first, and whether each question was answered."""
    asked: dict[str, Counter[str]] = defaultdict(Counter)
    right: dict[str, list[float]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        trajectory = Trajectory.from_json(line)
        kind = kinds[int(trajectory.extra["index"])]
        names = trajectory.calls[0].names if trajectory.calls else ()
        asked[kind][TAG_OF.get(names[0], names[0]) if names else NONE] += 1
        told: Mapping[str, float] = trajectory.extra.get("reward_extra_info", {})
        right[kind].append(float(told.get("acc", 0.0)))
    return asked, right


def table(title: str, asked: Mapping[str, Counter[str]], right: Mapping[str, list[float]]) -> Table:
    """Questions in rows, tools in columns."""
    result = Table("question for", *TOOLS, NONE, "answered", title=title)
    for kind in TOOLS:
        n = sum(asked[kind].values()) or 1
        shares = (f"{asked[kind][tool] / n:.0%}" for tool in (*TOOLS, NONE))
        result.add_row(kind, *shares, f"{sum(right[kind]) / n:.1%}")
    return result


def main(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Report on a run."""
    console, kinds = Console(), kinds_of(run)
    tables = {}
    for file in validations(run):
        asked, right = counted(file, kinds)
        tables[file.stem] = {"asked": {kind: dict(asked[kind]) for kind in TOOLS}, "right": right}
        if file in (validations(run)[0], validations(run)[-1]):
            console.print(table(file.stem.replace("_", " of step "), asked, right))
    (run / "tools_by_kind.json").write_text(json.dumps(tables), encoding="utf-8")
    report.main(run)


if __name__ == "__main__":
    typer.run(main)
