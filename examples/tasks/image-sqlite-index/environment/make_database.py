"""Makes a database of measurements without an index."""

import random
import sqlite3

draw = random.Random(7)
database = sqlite3.connect("measurements.db")
database.execute("CREATE TABLE readings (id INTEGER PRIMARY KEY, station TEXT, day TEXT, value REAL)")
database.executemany(
    "INSERT INTO readings (station, day, value) VALUES (?, ?, ?)",
    (
        (
            f"s{int(draw.random() * 500):03}",
            f"2023-{1 + int(draw.random() * 12):02}-{1 + int(draw.random() * 28):02}",
            n,
        )
        for n in range(40_000)
    ),
)
database.commit()
