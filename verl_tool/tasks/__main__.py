"""``python -m verl_tool.tasks check DIR``; see `check`.

Exit code 0: all tasks are right; 1: one is not, or could not be run; 2: there is nothing to check, or no sandbox to
check it in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.sandbox import SandboxPool
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.tasks.attacks import SHIPPED, TaskAttack, read_attacks
from verl_tool.tasks.check import TaskFinding, check, check_attacks
from verl_tool.tasks.task import Task, read_task, task_folders
from verl_tool.tasks.task_images import TaskImage, open_builder, prepare_image
from verl_tool.tasks.task_source import open_source
from verl_tool.tasks.task_workspace import TaskWorkspaces

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Tasks with files in Harbor's layout."""


@app.command("check")
def main(
    source: Annotated[
        str, typer.Argument(help="A task, a folder of tasks, the URL of a git repository, or a bare repository.")
    ],
    subfolder: Annotated[str, typer.Option("--subfolder", help="The folder of the tasks within it.")] = "",
    revision: Annotated[str, typer.Option("--revision", help="Branch, tag or commit of a repository.")] = "",
    backend: Annotated[
        str, typer.Option("--backend", help="docker or podman: tasks that need an image run in its containers.")
    ] = "",
    images: Annotated[bool, typer.Option("--images", help="With --backend: all tasks run in containers.")] = False,
    build_network: Annotated[
        str, typer.Option("--build_network", help="Network of RUN: none, host, or another that the engine knows.")
    ] = "none",
    base_image: Annotated[
        list[str] | None, typer.Option("--base_image", help="OLD=NEW: build FROM another image. Repeatable.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Run tasks that request a network without one.")] = False,
    network: Annotated[
        bool,
        typer.Option("--network", help="Tasks have the network that they have in Harbor: by default all hosts."),
    ] = False,
    trust_image: Annotated[
        bool,
        typer.Option(
            "--trust_image", help="Where programs are root, verifiers see all that they changed, and run it too."
        ),
    ] = False,
    shared_verifier: Annotated[
        bool,
        typer.Option("--shared_verifier", help="Verifiers run beside what solutions leave running, which can cheat."),
    ] = False,
    ignore_build: Annotated[
        bool, typer.Option("--ignore_build", help="Leave out what a Dockerfile builds (RUN, ENV, ...).")
    ] = False,
    attack: Annotated[
        str,
        typer.Option(
            help="A file or folder of attacks (TOML) that must get no reward; 'shipped': those of verl_tool.tasks."
        ),
    ] = "",
) -> None:
    """See that each task's solution gets the reward 1, doing nothing gets 0, and both do so twice."""
    console = Console(width=None, soft_wrap=False)
    try:
        attacks = read_attacks(SHIPPED if attack == "shipped" else Path(attack)) if attack else []
        builder = open_builder(backend, build_network, base_image or [])
        if offline and network:
            raise ConfigError("--offline and --network contradict each other; give one of them")
        if images and builder is None:
            raise ConfigError("--images runs tasks in containers; add --backend podman or docker")
        if (trust_image or shared_verifier) and builder is None:
            raise ConfigError("--trust_image and --shared_verifier are for containers; add --backend podman or docker")
        with open_source(source, subfolder=subfolder, revision=revision) as folder:
            reading = {"offline": offline, "network": network, "ignore_build": ignore_build}
            verifier = _VerifierOptions(trust_image, shared_verifier)
            run = _Check(task_folders(folder), reading, attacks, builder, images, verifier, console)
            findings = asyncio.run(run.run())
    except VerlToolError as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(2) from None
    _print(console, findings)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _VerifierOptions:
    """What verifiers see in containers, as of `TaskWorkspaces`."""

    trust_image: bool
    shared_verifier: bool


class _Check:
    """One run of the command."""

    def __init__(
        self,
        folders: Sequence[Path],
        reading: Mapping[str, bool],
        attacks: Sequence[TaskAttack],
        builder: ImageBuilder | None,
        all_images: bool,
        verifier: _VerifierOptions,
        console: Console,
    ) -> None:
        self._attacks, self._builder, self._all_images, self._console = attacks, builder, all_images, console
        self._verifier = verifier
        self._names = [folder.name for folder in folders]
        self._problems: dict[str, str] = {}
        self._tasks: dict[str, Task] = {}
        for folder in folders:
            try:
                self._tasks[folder.name] = read_task(folder, **reading)
            except VerlToolError as error:
                self._problems[folder.name] = str(error)

    async def run(self) -> list[TaskFinding]:
        with self._console.status("") as status:
            images = await self._prepare_images(status.update)
            async with SandboxPool(workers=1, warm_modules=(), for_sessions=True) as pool:
                workspaces = TaskWorkspaces(pool, self._builder, images, **asdict(self._verifier))
                findings = []
                for number, name in enumerate(self._names, 1):
                    status.update(f"{number} of {len(self._names)}: {escape(name)}")
                    finding = await self._check(name, workspaces)
                    warning = (
                        images[name].warning if name in images and not any(asdict(self._verifier).values()) else ""
                    )
                    findings.append(replace(finding, warning=warning))
        return findings

    async def _prepare_images(self, update: Callable[[str], None]) -> dict[str, TaskImage]:
        """Build the images of the tasks that need one, several at once. What fails is the problem of its task."""
        builder = self._builder
        if builder is None:
            return {}
        images: dict[str, TaskImage] = {}

        async def prepare(name: str, task: Task) -> None:
            try:
                images[name] = await prepare_image(
                    task, builder, lambda line: update(f"image of {escape(name)}: {escape(line[:100])}")
                )
            except VerlToolError as error:
                self._problems[name] = str(error)

        chosen = {
            name: task for name, task in self._tasks.items() if self._all_images or task.needs_image or task.image
        }
        await asyncio.gather(*(prepare(name, task) for name, task in chosen.items()))
        return images

    async def _check(self, name: str, workspaces: TaskWorkspaces) -> TaskFinding:
        if name in self._problems:
            return TaskFinding(name, problem=self._problems[name], ran=False)
        task = self._tasks[name]
        try:
            finding = await check(task, workspaces)
            return await check_attacks(finding, task, workspaces, self._attacks) if self._attacks else finding
        except VerlToolError as error:
            return TaskFinding(name, problem=str(error), ran=False)


def _print(console: Console, findings: Sequence[TaskFinding]) -> None:
    """Print a line for each task, and then what is wrong with which."""
    table = Table("task", "solution", "nothing", "attacks", "seconds", "")
    for finding in findings:
        rewards = (" ".join(f"{reward:g}" for reward in each) for each in (finding.solved, finding.idle))
        attacks = str(finding.attacks) if finding.attacks else ""
        seconds = f"{finding.seconds:.1f}" if finding.seconds else ""
        result = "[green]right[/green]" if not finding.problem else "[red]wrong[/red]" if finding.ran else "not run"
        table.add_row(escape(finding.name), *rewards, attacks, seconds, result)
    console.print(table)
    for finding in findings:
        if finding.problem:
            console.print(f"[red]{escape(finding.name)}[/red]: {escape(finding.problem)}", highlight=False)
        if finding.warning:
            console.print(f"[yellow]{escape(finding.name)}[/yellow]: {escape(finding.warning)}", highlight=False)


if __name__ == "__main__":
    app()
