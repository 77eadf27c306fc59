#!/bin/bash
set -e
cat > dates.py <<'PYTHON'
import datetime
import re

_DATE = re.compile(r"(?<!\w)(?<!\d[-/.])(\d{4})([-/.])(\d{2})\2(\d{2})(?!\w)(?![-/.]\d)", re.ASCII)


def find_dates(text):
    found = []
    for year, _, month, day in _DATE.findall(text):
        try:
            date = datetime.date(int(year), int(month), int(day))
        except ValueError:
            continue
        if date.year >= 1000:
            found.append(date.isoformat())
    return found
PYTHON
