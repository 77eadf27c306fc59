"""Compares the function on short lists with the definition, and on long ones, drawn anew each time, with a deadline."""

import random
from collections import Counter
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

draw = random.SystemRandom()
inputs = [
    [[draw.randint(low, low + width) for _ in range(length)], draw.randint(2 * low, 2 * (low + width))]
    for length in (0, 1, 2, 7, 30)
    for low in (-20, 0, 5)
    for width in (0, 3, 40)
]
inputs += [[[draw.randint(-spread, spread) for _ in range(60_000)], draw.randint(-9, 9)] for spread in (50, 40_000)]


def count_pairs(numbers, total):
    counts = Counter(numbers)
    ordered = sum(count * counts[total - number] for number, count in counts.items())
    return (ordered - (counts[total // 2] if total % 2 == 0 else 0)) // 2


expected = [count_pairs(numbers, total) for numbers, total in inputs]
code = "from pairs import count_pairs; result = [count_pairs(*each) for each in given]"
try:
    right = evaluate(code, inputs, seconds=10) == expected
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
