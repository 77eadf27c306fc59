"""Runs the script on a folder that is drawn anew each time."""

import random
from pathlib import Path

from in_workspace import WorkspaceError, run

draw = random.SystemRandom()
PARTS = ["a", "b c", "-n", "*", "x'y", 'q"q', "$HOME", "  two", "é", ".hidden", "[z]", "back\\slash", "-"]


def draw_files(folder):
    files, lines = {}, {}
    for name in draw.sample(PARTS, 7):
        path = draw.choice(["", "sub/", "sub/", "-d/", "deep down/*/"]) + name + draw.choice([".txt", ".txt", ".csv"])
        count = draw.randint(0, 5)
        text = "".join(f"line {n}\n" for n in range(count))
        if count and draw.random() < 0.5:
            text = text[:-1]
        files[f"{folder}/{path}"] = text
        if path.endswith(".txt"):
            lines[path.encode()] = f"{count} {path}\n"
    return files, "".join(lines[path] for path in sorted(lines))


right = True
try:
    for folder in ("plain", "with blank", "-dash", "*"):
        files, expected = draw_files(folder)
        result = run(["bash", "count.sh", folder], files=files, seconds=10)
        right = right and (result.exit_code, result.stdout) == (0, expected)
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
