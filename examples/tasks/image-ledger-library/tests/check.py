"""Compares the balances with the right ones."""

import json
import os
import stat
from pathlib import Path

BALANCES = {"books": -47608, "food": -45438, "gifts": -142463, "rent": -140075, "salary": 111621, "travel": 112063}


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
    right = json.loads(text_of("balances.json") or "") == BALANCES
except (ValueError, RecursionError):
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
