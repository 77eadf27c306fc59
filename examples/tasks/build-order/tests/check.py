"""Compares the order with the right one."""

import os
import stat
from pathlib import Path

ORDER = "auth events files log mail jobs metrics queue search web core db storage billing cache http users"


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


right = (text_of("order.txt") or "").split() == ORDER.split()
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
