"""Rows of tiny projects with a bug in one line, judged by hidden tests with the verifier of the large ones.

python examples/train/swe/make_projects.py --local_dir outputs/swe/data
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).resolve().parents[2] / "data_preprocess"))
from rows import LocalDir, Row, Seed, convert, messages, row, run, save
from swe import make_verification
from swe_sources import Problem
from tiny_projects import Project, projects

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.protocol import FILES_FIELD
from verl_tool.verification import STYLE

DATA_SOURCE = "one_line_bug"
SECONDS = 10.0
"""For the tests of a project."""


def problem_of(project: Project, name: str) -> Problem:
    """Return a project as those that `swe_sources.py` reads, in the workspace's own folder."""
    test = f"test_{project.bug.file}"
    return Problem(
        **{"name": name, "repository": project.bug.module, "statement": project.issue, "image": "", "workdir": "."},
        test=f"python3 {test}",
        parser="pytest",
        fail_to_pass=[project.bug.name],
        pass_to_pass=[function.name for function in project.others],
        hidden={test: project.hidden_test},
    )


def as_row(source: Mapping[str, Any], split: str, index: int) -> Row:
    """One row of a project."""
    project: Project = source["project"]
    packed = pack_files({name: PackedFile(text.encode()) for name, text in project.files.items()})
    extra = {"tools_kwargs": {FILES_FIELD: packed}}
    truth = make_verification(problem_of(project, f"{split}-{index}"), SECONDS).model_dump_json()
    made = row(DATA_SOURCE, messages(None, project.issue), "one-line-bug", truth, split, index, extra)
    return {**made, "reward_model": {**made["reward_model"], "style": STYLE}}


def main(
    local_dir: LocalDir,
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Projects to train on.")] = 1600,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out projects, none of the others.")] = 128,
    seed: Seed = 0,
) -> None:
    """Make train.parquet and test.parquet."""
    made = [{"project": project} for project in projects(train_size + test_size, seed)]
    save(convert({"train": made[:train_size], "test": made[train_size:]}, as_row), local_dir)


if __name__ == "__main__":
    run(main)
