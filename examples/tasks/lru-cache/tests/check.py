"""Compares the cache with a simple one, on calls that are drawn anew each time."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

draw = random.SystemRandom()
inputs = [
    [
        size,
        [
            [draw.choice(["get", "put", "put", "peek"]), draw.choice("abcdef"), draw.choice([None, 0, 1, 2])]
            for _ in range(40)
        ],
    ]
    for size in (0, 1, 2, 3, 5)
    for _ in range(6)
]


def results(size, calls):
    entries, found = [], []
    for name, key, value in calls:
        known = dict(entries)
        if name == "put":
            entries = [entry for entry in entries if entry[0] != key] + [(key, value)]
            entries = entries[len(entries) - size :] if len(entries) > size else entries
        elif name == "get" and key in known:
            entries = [entry for entry in entries if entry[0] != key] + [(key, known[key])]
        found.append([None if name == "put" else known.get(key, "absent"), [key for key, _ in entries]])
    return found


expected = [results(*each) for each in inputs]
code = """
from cache import Cache
result = []
for size, calls in given:
    cache, found = Cache(size), []
    for name, key, value in calls:
        answer = cache.put(key, value) if name == "put" else getattr(cache, name)(key, "absent")
        found.append([None if name == "put" else answer, list(cache.keys())])
    result.append(found)
"""
try:
    right = evaluate(code, inputs, seconds=10) == expected
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
