"""Run a function as a command line."""

from __future__ import annotations

from collections.abc import Callable

import typer


def run_command(command: Callable[..., None]) -> None:
    """Run a typer command with the arguments of this process."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()
