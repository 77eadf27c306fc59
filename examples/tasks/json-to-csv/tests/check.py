"""Compares the rows of the table with the right ones."""

import csv
import os
import stat
from pathlib import Path

ROWS = [
    ["name", "born", "mail", "phone", "tags"],
    ["Dana Okafor", "1979-07-15", "", "", "alumni;guest;staff"],
    ["Fatima Noor", "1984-02-28", "noor@example.org", "", "admin"],
    ["Ada Brandt", "1984-02-29", "ada@example.org", "", "admin;staff"],
    ['Björn "BJ" Ek', "1991-11-03", "", "+46 8 123", ""],
    ["Émile Roux", "2001-01-01", "e@example.com", "0033 1 22", "staff"],
    ["Chidi, Jr.", "", "chidi@example.org", "", "guest"],
]


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


text = text_of("people.csv")
try:
    right = text is not None and list(csv.reader(text.splitlines())) == ROWS
except csv.Error:
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
