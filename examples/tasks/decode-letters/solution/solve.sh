#!/bin/bash
set -e
python3 - <<'PYTHON'
import csv
from pathlib import Path

NAMES = {"utf-8 with a byte order mark": "utf-8-sig", "utf-16 with a byte order mark": "utf-16"}
for row in csv.DictReader(open("index.csv")):
    path = Path("letters", row["file"])
    path.write_bytes(path.read_bytes().decode(NAMES.get(row["encoding"], row["encoding"])).encode())
PYTHON
