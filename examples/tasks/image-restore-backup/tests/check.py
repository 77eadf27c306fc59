"""Compares the files of the restored folder with the right ones."""

import os
import stat
from pathlib import Path

FILES = {"notes/a.txt": "second\n", "notes/moved.txt": "keep\n", "e.txt": "third time\n"}


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


found = set()
for folder, folders, names in os.walk("restored"):
    found |= {os.path.relpath(os.path.join(folder, name), "restored") for name in names}
    if len(folders) + len(found) > 100:
        break
right = found == set(FILES) and all(text_of(f"restored/{path}") == text for path, text in FILES.items())
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
