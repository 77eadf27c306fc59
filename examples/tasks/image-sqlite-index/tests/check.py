"""Asks SQLite how it would run the query, and compares the readings."""

import os
import random
import sqlite3
import stat
from pathlib import Path

QUERY = "EXPLAIN QUERY PLAN SELECT max(value) FROM readings WHERE station = ? AND day >= ? AND day < ?"
READINGS = "SELECT id, station, day, value FROM readings NOT INDEXED ORDER BY id"


def readings():
    draw = random.Random(7)
    for n in range(40_000):
        station = f"s{int(draw.random() * 500):03}"
        day = f"2023-{1 + int(draw.random() * 12):02}-{1 + int(draw.random() * 28):02}"
        yield n + 1, station, day, n


def is_right():
    found = os.lstat("measurements.db")
    if not stat.S_ISREG(found.st_mode) or found.st_size > 50_000_000:
        return False
    database = sqlite3.connect("file:measurements.db?mode=ro", uri=True)
    plan = " ".join(row[3] for row in database.execute(QUERY, ("s001", "2023-01-01", "2023-02-01")))
    print(plan)
    table = database.execute("SELECT type FROM sqlite_master WHERE name = 'readings'").fetchall()
    kept = database.execute(READINGS).fetchmany(40_001)
    return "USING COVERING INDEX" in plan and table == [("table",)] and kept == list(readings())


try:
    right = is_right()
except (sqlite3.Error, OSError) as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
