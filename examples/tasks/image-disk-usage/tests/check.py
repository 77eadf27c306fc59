"""Compares the answer with the right one."""

import os
import stat
from pathlib import Path

LINES = ["63441 zeta/beta", "56388 zeta/alpha", "45361 epsilon/epsilon"]


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


right = [" ".join(line.split()) for line in (text_of("answer.txt") or "").strip().splitlines()] == LINES
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
