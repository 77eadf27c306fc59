"""Compares the function with a count of the covered numbers, on ranges that are drawn anew each time."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

draw = random.SystemRandom()
inputs = [
    [[first, first + draw.randint(-2, width)] for first in draw.choices(range(-30, 60), k=count)]
    for count in (0, 1, 2, 3, 5, 8, 13)
    for width in (0, 2, 5, 30)
    for _ in range(3)
]


def merge(ranges):
    covered = sorted({number for first, last in ranges for number in range(first, last + 1)})
    merged = []
    for number in covered:
        if merged and merged[-1][1] == number - 1:
            merged[-1][1] = number
        else:
            merged.append([number, number])
    return merged


expected = [[merge(ranges), ranges] for ranges in inputs]
code = "from ranges import merge; result = [[[list(r) for r in merge(ranges)], ranges] for ranges in given]"
try:
    right = evaluate(code, inputs, seconds=10) == expected
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
