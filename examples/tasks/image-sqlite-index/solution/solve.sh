#!/bin/bash
set -e
python3 - <<'PYTHON'
import sqlite3

database = sqlite3.connect("measurements.db")
database.execute("CREATE INDEX readings_of_station ON readings (station, day, value)")
database.commit()
PYTHON
