"""Makes a tree of files of many sizes."""

import random
from pathlib import Path

draw = random.Random(31)
NAMES = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
for team in NAMES:
    for project in NAMES:
        for _ in range(int(draw.random() * 8)):
            folder = Path("storage", team, project, *(["archive"] if draw.random() < 0.4 else []))
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{int(draw.random() * 10**6):06}.{'log' if draw.random() < 0.5 else 'dat'}"
            (folder / name).write_bytes(b"x" * int(draw.random() ** 3 * 40_000))
