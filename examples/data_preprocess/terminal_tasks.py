"""Tasks with files in Harbor's layout, for the reward manager `terminal`.

    python examples/data_preprocess/terminal_tasks.py --tasks examples/tasks --local_dir data/terminal --test_size 1 \
        --backend podman

Each task is a row. The files of its workspace are packed into `extra_info.tools_kwargs.workspace_files`, which goes to
the tool server with a trajectory's first call; its verifier into `reward_model.ground_truth`, which goes there when the
trajectory is over. A task that needs an image has its name in `extra_info.tools_kwargs.workspace_image` instead of
files, and what task.toml says of CPUs, memory and network in `workspace_limits`; the image is built on this machine.
Check tasks first: `python -m verl_tool.tasks check examples/tasks`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rows import LocalDir, Row, Seed, TestSize, convert, divide, messages, row, run, save

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.protocol import FILES_FIELD, WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.tasks.task import Task, read_task, task_folders
from verl_tool.tasks.task_images import TaskImage, is_published, open_builder, prepare_image
from verl_tool.tasks.task_source import open_source
from verl_tool.verification import STYLE
from verl_tool.workspace_limits import WorkspaceLimits

DATA_SOURCE = "terminal_tasks"
_NO_NETWORK = "without a network"
SYSTEM = (
    f"You work in a folder of your own on a Linux machine {_NO_NETWORK}. Do what you are asked by calling your "
    "tools; what you leave in the folder is checked when you are done."
)


def as_row(task: Mapping[str, Any], split: str, index: int) -> Row:
    """One row of a task."""
    what: Task = task["task"]
    image: TaskImage | None = task["image"]
    files, name = what.packed_files(), image.name if image is not None else ""
    verification = image.verification_of(what) if image is not None else what.verification
    limits = _limits_of(what).model_dump(mode="json") if image is not None else None
    values = ((FILES_FIELD, files), (WORKSPACE_IMAGE_FIELD, name), (WORKSPACE_LIMITS_FIELD, limits))
    sent = {field: value for field, value in values if value}
    extra = {"task": what.name, **({"tools_kwargs": sent} if sent else {})}
    made = row(
        DATA_SOURCE,
        messages(_describe_network(task["system"], what.allowed_hosts) or None, what.instruction),
        str(what.metadata.get("category", "terminal")),
        verification.model_dump_json(),
        split,
        index,
        extra,
    )
    return {**made, "reward_model": {**made["reward_model"], "style": STYLE}}


def _describe_network(system: str, hosts: Sequence[str]) -> str:
    """The system message of a task that reaches `hosts`."""
    reached = "all hosts" if "*" in hosts else ", ".join(hosts)
    return system.replace(_NO_NETWORK, f"whose network reaches {reached}") if hosts else system


def _limits_of(task: Task) -> WorkspaceLimits:
    """What ``task.toml`` requests of the container."""
    table = task.environment
    requested = {"cpus": table.cpus, "memory_mb": table.memory_mb or table.memory, "allowed_hosts": task.allowed_hosts}
    return WorkspaceLimits.parse(requested, f"task {task.name}: environment")


def read_tasks(
    folders: Sequence[Path],
    *,
    ignore_build: bool,
    offline: bool,
    network: bool,
    builds: bool,
    images: bool,
    skip: bool,
) -> list[Task]:
    """Read the tasks.

    Args:
        builds: images are built.
        images: all tasks run in images.
        skip: print why a task is not supported, and leave it out.

    Raises ConfigError with everything that is not supported.
    """
    tasks, problems = [], []
    for folder in folders:
        try:
            reading = {"ignore_build": ignore_build, "offline": offline, "network": network}
            task = read_task(folder, **reading, with_solution=False)
            if task.needs_image and not builds and not (images and is_published(task)):
                raise ConfigError(f"task {folder}: {task.needs_image}; build its image with --backend podman or docker")
            tasks.append(task)
        except ConfigError as error:
            problems.append(str(error))
    if problems and not skip:
        raise ConfigError("\n".join([*problems, "leave such tasks out with --skip_unsupported"]))
    for problem in problems:
        print(f"left out: {problem}")
    if hosts := sorted({host for task in tasks for host in (*task.allowed_hosts, *task.verifier_hosts)}):
        print(f"hosts that tasks reach; serve the tools with allowed_hosts={json.dumps(hosts)}")
    return tasks


async def build_images(
    tasks: Sequence[Task], builder: ImageBuilder, every: bool, skip: bool
) -> list[tuple[Task, TaskImage | None]]:
    """Return the tasks with their images; None for one that needs none, unless `every` task gets one. skip: print why
    an image cannot be had, and leave the task out. Otherwise raises ConfigError, SandboxError."""

    with Console().status("images") as status:

        async def build(task: Task) -> list[tuple[Task, TaskImage | None]]:
            if not every and not task.needs_image and not task.image:
                return [(task, None)]

            def display(line: str) -> None:
                status.update(f"image of {escape(task.name)}: {escape(line[:100])}")

            try:
                image = await prepare_image(task, builder, display)
            except VerlToolError as error:
                if not skip:
                    raise
                status.console.print(f"left out: {task.name}: {error}", markup=False, soft_wrap=True)
                return []
            for line in (f"image of {task.name}: {image.name}", *([image.warning] if image.warning else [])):
                status.console.print(line, markup=False, soft_wrap=True)
            return [(task, image)]

        return [pair for pairs in await asyncio.gather(*map(build, tasks)) for pair in pairs]


def main(
    tasks: Annotated[
        str, typer.Option("--tasks", help="A folder of tasks, or a git repository with them.")
    ] = "examples/tasks",
    local_dir: LocalDir = Path("data/terminal"),
    test_size: TestSize = 0,
    seed: Seed = 0,
    system: Annotated[str, typer.Option("--system", help="The system message; empty: none.")] = SYSTEM,
    ignore_build: Annotated[
        bool, typer.Option("--ignore_build", help="Leave out what a Dockerfile builds (RUN, ENV, ...).")
    ] = False,
    images: Annotated[
        bool,
        typer.Option(
            "--images",
            help="All tasks run in images: environment.docker_image, or with --backend one that is built.",
        ),
    ] = False,
    backend: Annotated[
        str, typer.Option("--backend", help="docker or podman: builds the images of tasks that need one.")
    ] = "",
    build_network: Annotated[
        str, typer.Option("--build_network", help="Network of RUN: none, host, or another that the engine knows.")
    ] = "none",
    base_image: Annotated[
        list[str] | None, typer.Option("--base_image", help="OLD=NEW: build FROM another image. Repeatable.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Take tasks that request a network, without one.")] = False,
    network: Annotated[
        bool,
        typer.Option(
            "--network", help="Give tasks the network of Harbor, and print the hosts for the tools' allowed_hosts."
        ),
    ] = False,
    skip_unsupported: Annotated[
        bool, typer.Option("--skip_unsupported", help="Leave out tasks that are not supported, and print why.")
    ] = False,
    subfolder: Annotated[str, typer.Option("--subfolder", help="The folder of the tasks within --tasks.")] = "",
    revision: Annotated[str, typer.Option("--revision", help="Branch, tag or commit of a repository.")] = "",
) -> None:
    """Write train.parquet, and test.parquet with `test_size` tasks that are held out."""
    builder = open_builder(backend, build_network, [text for text in base_image or [] if text])
    with open_source(str(tasks), subfolder=subfolder, revision=revision) as folder:
        read = read_tasks(
            task_folders(folder),
            ignore_build=ignore_build,
            offline=offline,
            network=network,
            builds=builder is not None,
            images=images,
            skip=skip_unsupported,
        )
        found = [(task, TaskImage.from_published(task) if images else None) for task in read]
        if builder is not None:
            found = asyncio.run(build_images(read, builder, images, skip_unsupported))
    source = [{"name": task.name, "task": task, "system": system, "image": image} for task, image in found]
    save(convert(divide(source, "name", test_size, seed), as_row), local_dir)


if __name__ == "__main__":
    run(main)
