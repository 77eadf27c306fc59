#!/bin/bash
set -e
cat > pairs.py <<'PYTHON'
"""Pairs of numbers with a given sum."""

from collections import Counter


def count_pairs(numbers, total):
    """Return how many pairs of positions i < j have numbers[i] + numbers[j] == total."""
    seen, count = Counter(), 0
    for number in numbers:
        count += seen[total - number]
        seen[number] += 1
    return count
PYTHON
