#!/bin/bash
set -e
python3 - <<'PYTHON'
import csv
from pathlib import Path

invoices = {}
for path in Path("invoices").glob("*.csv"):
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            invoices[row["number"]] = row
owed = {}
for row in invoices.values():
    if row["paid"] == "no":
        owed[row["customer"]] = owed.get(row["customer"], 0) + int(row["cents"])
with open("owed.csv", "w", newline="") as file:
    csv.writer(file, lineterminator="\n").writerows([("customer", "cents"), *sorted(owed.items())])
PYTHON
