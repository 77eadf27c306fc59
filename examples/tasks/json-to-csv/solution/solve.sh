#!/bin/bash
set -e
python3 - <<'PYTHON'
import csv
import json

with open("people.json", encoding="utf-8") as file:
    people = json.load(file)
people.sort(key=lambda person: (person["born"] is None, person["born"] or ""))
with open("people.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["name", "born", "mail", "phone", "tags"])
    for person in people:
        contact = person["contact"]
        mail = (contact.get("mail") or [""])[0]
        tags = ";".join(sorted(person["tags"]))
        writer.writerow(
            [person["name"].replace("\n", " "), person["born"] or "", mail, contact.get("phone", ""), tags]
        )
PYTHON
