"""The command: run the selected parts one after the other, print a table, write the report.

Exit code 0: no part failed (some may have been skipped); 1: one did; 2: usage; 130: interrupted, with a report of the
parts until then.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_tool.doctor.gpu_smoke.machine import describe_machine, scrub
from verl_tool.doctor.gpu_smoke.part import (
    CPU_FACTOR,
    Part,
    PartContext,
    PartResult,
    UsageError,
    missing_packages,
    select_parts,
)
from verl_tool.doctor.gpu_smoke.part_process import run_part
from verl_tool.doctor.gpu_smoke.smoke_report import (
    COLOURS,
    count_statuses,
    describe_result,
    report_json,
    result_table,
    titles,
    write_report,
)

GPU_MINUTES = 30.0
console = Console(stderr=True)


def command(
    parts: Annotated[str, typer.Option("--parts", help="Only these, separated by commas. Default: all.")] = "",
    list_parts: Annotated[bool, typer.Option("--list", help="List the parts and end.")] = False,
    device: Annotated[
        str, typer.Option("--device", help="cuda, cpu, or auto: cuda if torch finds a GPU.", envvar="DEVICE")
    ] = "auto",
    output: Annotated[Path, typer.Option("--output", help="The report, a JSON file to send.")] = Path(
        "outputs/gpu_smoke/report.json"
    ),
    folder: Annotated[Path, typer.Option("--folder", help="For models, runs and logs.")] = Path("outputs/gpu_smoke"),
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.1,
            help="Start no part behind these, and stop what runs then. Default: 30; without a limit on a CPU.",
        ),
    ] = None,
) -> None:
    """Check that this machine's GPU, its packages and this project work together; needs no network."""
    if list_parts:
        Console().print(titles())
        return
    try:
        selected = select_parts([name.strip() for name in parts.split(",") if name.strip()])
        if device not in ("auto", "cuda", "cpu"):
            raise UsageError(f"--device is {device!r}; it must be auto, cuda or cpu")
        machine = describe_machine()
        chosen = _choose_device(device, machine)
    except UsageError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    limit = minutes if minutes is not None else (GPU_MINUTES if chosen == "cuda" else None)
    _print_machine(machine, chosen, limit)
    started = time.monotonic()
    results: list[PartResult] = []
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run_parts(selected, PartContext(chosen, folder.resolve()), limit and limit * 60, results)
    except KeyboardInterrupt:
        done = {result.name for result in results}
        results += [PartResult(part.name, "skipped", "interrupted") for part in selected if part.name not in done]
        code = 130
    else:
        code = 1 if any(result.status == "failed" for result in results) else 0
    write_report(report_json(machine, chosen, results, time.monotonic() - started), output)
    Console().print(result_table(results, chosen))
    counts = ", ".join(f"{count} {status}" for status, count in count_statuses(results).items())
    console.print(f"{counts} in {(time.monotonic() - started) / 60:.1f} min; to send: {output}", soft_wrap=True)
    raise typer.Exit(code)


def run_parts(
    parts: Sequence[Part], context: PartContext, limit_seconds: float | None, results: list[PartResult]
) -> None:
    """Append the result of each part to `results` as it is known."""
    started = time.monotonic()
    with _progress() as progress:
        for number, part in enumerate(parts, start=1):
            task = progress.add_task(f"{number}/{len(parts)} {part.name}: {part.title}", total=None)
            remaining = None if limit_seconds is None else limit_seconds - (time.monotonic() - started)
            result = _run_or_skip(part, context, remaining, results)
            progress.remove_task(task)
            result.reason = scrub(result.reason)
            results.append(result)
            line = f"[{COLOURS[result.status]}]{result.status}[/] {part.name} ({result.seconds:.0f} s)"
            progress.console.print(f"{line} {escape(describe_result(result))}", highlight=False, soft_wrap=True)


def _run_or_skip(
    part: Part, context: PartContext, remaining: float | None, results: Sequence[PartResult]
) -> PartResult:
    missing = missing_packages(part.packages)
    if missing:
        return PartResult(part.name, "skipped", f"not installed: {', '.join(missing)}")
    status_of = {result.name: result.status for result in results}
    unmet = [f"{name} {status_of.get(name, 'did not run')}" for name in part.after if status_of.get(name) != "passed"]
    if unmet:
        return PartResult(part.name, "skipped", f"it continues another part: {', '.join(unmet)}")
    deadline = part.seconds * (CPU_FACTOR if context.device == "cpu" else 1)
    if remaining is not None and remaining < min(deadline, MIN_SECONDS):
        return PartResult(part.name, "skipped", "no time left; raise --minutes, or name it in --parts")
    if remaining is None or remaining >= deadline:
        return run_part(part, context, deadline)
    result = run_part(part, context, remaining)
    if result.status == "failed" and result.seconds >= remaining:
        result.status, result.reason = "skipped", f"stopped after {remaining:.0f} s, when --minutes were over"
    return result


MIN_SECONDS = 20.0
"""A part is not started with less time than this."""


def _choose_device(device: str, machine: dict[str, Any]) -> str:
    found = bool(machine["gpus"])
    if device == "cuda" and not found:
        raise UsageError("--device is cuda, and torch finds no GPU; see nvidia-smi, and that torch is built for CUDA")
    return device if device != "auto" else ("cuda" if found else "cpu")


def _print_machine(machine: dict[str, Any], device: str, limit: float | None) -> None:
    names = ", ".join(gpu["name"] for gpu in machine["gpus"]) or f"no GPU, {machine['cpus']} CPU cores"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(f"device {device} ({names}), driver {machine['driver']}, CUDA {machine['cuda']}", highlight=False)
    console.print(f"Python {machine['python']}, {versions}", highlight=False)
    console.print("no limit" if limit is None else f"at most {limit:g} minutes", highlight=False)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
