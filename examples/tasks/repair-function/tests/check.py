"""Compares both functions with their definitions, on lists that are drawn anew each time."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

draw = random.SystemRandom()
lists = [[draw.randint(low, low + 40) for _ in range(length)] for low in (-90, -20, 5, 60) for length in range(7)]


def median(values):
    ordered, half = sorted(values), len(values) // 2
    if not values:
        return None
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


expected = [[median(values), max(values, default=0) - min(values, default=0)] for values in lists]
code = "import statistics_of as s; result = [[s.median(list(v)), s.spread(list(v))] for v in given]"
try:
    right = evaluate(code, lists, seconds=10) == expected
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
