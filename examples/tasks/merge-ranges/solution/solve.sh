#!/bin/bash
set -e
cat > ranges.py <<'PYTHON'
"""Closed ranges of whole numbers."""


def merge(ranges):
    """Return the fewest ranges that cover the same whole numbers, as lists [first, last] in ascending order."""
    merged = []
    for first, last in sorted(map(list, ranges)):
        if first > last:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged
PYTHON
