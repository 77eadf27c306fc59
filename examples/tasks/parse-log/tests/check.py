"""Compares the report with the one that is wanted; a right key gives a quarter as ``keys``, all of them the reward."""

import json
import os
import stat

WANTED = {"requests": 376, "failed": 58, "slowest": "/static/app.js", "busiest_host": "10.0.0.84"}


def report(path):
    """The object in a small plain file; an empty one of anything else."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > 100_000:
            return {}
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


given = report("report.json")
right = sum(given.get(key) == value and not isinstance(given.get(key), bool) for key, value in WANTED.items())
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": float(right == len(WANTED) == len(given)), "keys": right / len(WANTED)}, file)
