"""The report of a smoke test: a table for the terminal, and a JSON file to send."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import verl_tool
from verl_tool.doctor.gpu_smoke.machine import scrub
from verl_tool.doctor.gpu_smoke.part import PARTS, Figures, PartResult
from verl_tool.util.atomic_files import atomic_write

FORMAT = 1
"""Of the JSON file."""
COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def report_json(machine: dict[str, Any], device: str, results: Sequence[PartResult], seconds: float) -> dict[str, Any]:
    """All that is sent. No path, host, user, address or secret is in it (`machine.scrub`)."""
    report = {
        "format": FORMAT,
        "verl_tool": verl_tool.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device,
        "seconds": round(seconds, 1),
        "counts": count_statuses(results),
        "machine": machine,
        "parts": [asdict(result) for result in results],
    }
    return scrub(report)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def count_statuses(results: Sequence[PartResult]) -> dict[str, int]:
    counts: Counter[str] = Counter(result.status for result in results)
    return {status: counts[status] for status in COLOURS}


def result_table(results: Sequence[PartResult], device: str) -> Table:
    memory = "GPU GiB" if device == "cuda" else "host GiB"
    table = Table("part", "status", "s", memory, "figures, or the reason")
    for column in (2, 3):
        table.columns[column].justify = "right"
    for result in results:
        peak = result.peak_device_bytes if device == "cuda" else result.peak_host_bytes
        table.add_row(
            result.name,
            f"[{COLOURS[result.status]}]{result.status}[/]",
            f"{result.seconds:.0f}" if result.seconds else "",
            f"{peak / 2**30:.2f}" if peak else "",
            escape(describe_result(result)),
        )
    return table


def describe_result(result: PartResult) -> str:
    """The reason, or the figures in a line: ``name value`` of each, those within others by ``outer.inner``."""
    return result.reason or ", ".join(f"{name} {_short(value)}" for name, value in _flat(result.figures))


def titles() -> Table:
    """What `--list` prints."""
    table = Table("part", "checks", "after")
    for part in PARTS:
        table.add_row(part.name, part.title, ", ".join(part.after))
    return table


def _flat(figures: Figures, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in figures.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
