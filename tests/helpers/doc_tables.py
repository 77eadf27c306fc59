"""Tables of the pages in assets/docs."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "assets/docs"


def table(page: str, first_heading: str) -> list[list[str]]:
    """Return the rows, as their cells, of the table whose first column has this heading."""
    lines = (DOCS / page).read_text("utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    assert rows, f"{page} has no rows below {first_heading}"
    return rows


def names(cell: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)
