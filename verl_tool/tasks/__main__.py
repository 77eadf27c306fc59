"""``python -m verl_tool.tasks check DIR``; see `check`.

Exit code 0: all tasks are right; 1: one is not; 2: there is nothing to check, or no sandbox to check it in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.sandbox import SandboxPool
from verl_tool.tasks.attacks import SHIPPED, TaskAttack, read_attacks
from verl_tool.tasks.check import TaskFinding, check, check_attacks
from verl_tool.tasks.task import read_task, task_folders

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Tasks with files in Harbor's layout."""


@app.command("check")
def main(
    folder: Annotated[Path, typer.Argument(help="A task, or a folder of tasks.")],
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
        findings = asyncio.run(_check_all(task_folders(folder), ignore_build, attacks))
    except VerlToolError as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(2) from None
    console.print(_table(findings))
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


async def _check_all(folders: Sequence[Path], ignore_build: bool, attacks: Sequence[TaskAttack]) -> list[TaskFinding]:
    findings = []
    async with SandboxPool(workers=1, warm_modules=(), for_sessions=True) as pool:
        for folder in folders:
            try:
                task = read_task(folder, ignore_build=ignore_build)
            except ConfigError as error:
                findings.append(TaskFinding(folder.name, problem=str(error)))
            else:
                finding = await check(task, pool)
                findings.append(await check_attacks(finding, task, pool, attacks) if attacks else finding)
    return findings


def _table(findings: Sequence[TaskFinding]) -> Table:
    table = Table("task", "solution", "nothing", "attacks", "seconds", "")
    for finding in findings:
        description = f"[red]{escape(finding.problem)}[/red]" if finding.problem else "[green]right[/green]"
        rewards = (" ".join(f"{reward:g}" for reward in each) for each in (finding.solved, finding.idle))
        attacks = str(finding.attacks) if finding.attacks else ""
        seconds = f"{finding.seconds:.1f}" if finding.seconds else ""
        table.add_row(escape(finding.name), *rewards, attacks, seconds, description)
    return table


if __name__ == "__main__":
    app()
