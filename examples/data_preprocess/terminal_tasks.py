"""Tasks with files in Harbor's layout, for the reward manager `terminal`.

    python examples/data_preprocess/terminal_tasks.py --tasks examples/tasks --local_dir data/terminal --test_size 1

Each task is a row. The files of its workspace are packed into `extra_info.tools_kwargs.workspace_files`, which goes to
the tool server with a trajectory's first call; its verifier into `reward_model.ground_truth`, which goes there when the
trajectory is over. Check tasks first: `python -m verl_tool.tasks check examples/tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import LocalDir, Row, Seed, TestSize, convert, divide, messages, row, run, save

from verl_tool.protocol import FILES_FIELD, WORKSPACE_IMAGE_FIELD
from verl_tool.tasks.task import Task, read_task, task_folders
from verl_tool.verification import STYLE

DATA_SOURCE = "terminal_tasks"
SYSTEM = (
    "You work in a folder of your own on a Linux machine without a network. Do what you are asked by calling your "
    "tools; what you leave in the folder is checked when you are done."
)


def as_row(task: Mapping[str, Any], split: str, index: int) -> Row:
    """One row of a task."""
    what: Task = task["task"]
    files = what.packed_files()
    image = what.image if task["images"] else None
    sent = {name: value for name, value in ((FILES_FIELD, files), (WORKSPACE_IMAGE_FIELD, image)) if value}
    extra = {"task": what.name, **({"tools_kwargs": sent} if sent else {})}
    made = row(
        DATA_SOURCE,
        messages(task["system"] or None, what.instruction),
        str(what.metadata.get("category", "terminal")),
        what.verification.model_dump_json(),
        split,
        index,
        extra,
    )
    return {**made, "reward_model": {**made["reward_model"], "style": STYLE}}


def main(
    tasks: Annotated[Path, typer.Option("--tasks", help="A folder of tasks.")] = Path("examples/tasks"),
    local_dir: LocalDir = Path("data/terminal"),
    test_size: TestSize = 0,
    seed: Seed = 0,
    system: Annotated[str, typer.Option("--system", help="The system message; empty: none.")] = SYSTEM,
    ignore_build: Annotated[
        bool, typer.Option("--ignore_build", help="Leave out what a Dockerfile builds (RUN, ENV, ...).")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Agent programs run in each task's environment.docker_image.")
    ] = False,
) -> None:
    """Write train.parquet, and test.parquet with `test_size` tasks that are held out."""
    read = [read_task(folder, ignore_build=ignore_build) for folder in task_folders(tasks)]
    source = [{"name": task.name, "task": task, "system": system, "images": images} for task in read]
    save(convert(divide(source, "name", test_size, seed), as_row), local_dir)


if __name__ == "__main__":
    run(main)
