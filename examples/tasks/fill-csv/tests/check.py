"""Compares the table with the one that is wanted, and gives the share of its totals that are right as ``totals``."""

import csv
import json
import os
import stat

WANTED = [
    ("1001", "kettle", "2", "49.00"),
    ("1002", "lamp", "1", "32.00"),
    ("1003", "chair, folding", "6", "98.28"),
    ("1004", "lamp", "10", "288.00"),
    ("1005", "kettle", "1", "24.50"),
    ("1006", "rug", "3", "149.85"),
    ("1007", "chair, folding", "5", "81.90"),
    ("1008", "rug", "12", "539.46"),
]


def rows_of(path):
    """The rows of a small plain file; none of anything else."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > 100_000:
            return []
        with open(path, newline="", encoding="utf-8") as file:
            return [tuple(row) for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


rows = rows_of("orders.csv")
same = rows == [("order", "product", "quantity", "total"), *WANTED]
right = sum(wanted in rows for wanted in WANTED) / len(WANTED)
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": float(same), "totals": right}, file)
