"""Compares the answer with the right one."""

import json
import os
import stat
from pathlib import Path

RIGHT = {"hour": 13, "path": "/api/stock", "failed": 66, "requests": 250}


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
    answer = json.loads(text_of("answer.json") or "")
except (ValueError, RecursionError):
    answer = None
right = answer == RIGHT
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
