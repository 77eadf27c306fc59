"""Compares the report with the right one."""

import json
import os
import stat
from pathlib import Path

ROWS = [
    ["Dorothea", 7, 19700],
    ["Hanna", 4, 18824],
    ["Emil", 5, 17136],
    ["Arnold", 4, 13865],
    ["Berta", 2, 7794],
    ["Gustav", 2, 7687],
    ["Frida", 3, 5198],
    ["Cem", 2, 1172],
    ["Ida", 0, 0],
]


def text_of(path):
    """The text of a small plain file; None of anything else."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > 200_000:
            return None
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return None


try:
    report = json.loads(text_of("report.json") or "")
except (ValueError, RecursionError):
    report = None
right = report == [{"name": name, "orders": orders, "cents": cents} for name, orders, cents in ROWS]
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
