"""Compares the bytes of the letters with the right ones."""

import os
import stat
from pathlib import Path

LETTERS = {
    "anna.txt": "Grüße aus Köln,\nÄnderungen folgen.\n",
    "bela.txt": "Szép napot – és „jó“ utat…\n",
    "carlo.txt": "Perché no? Il caffè costa 2 €.\n",
    "dmitri.txt": "Добрый день, Борис!\n",
    "eiko.txt": "こんにちは、世界。\n",
    "frank.txt": "Already UTF-8: naïve café\n",
    "gerda.txt": "Mit Marke: größer\n",
    "hugo.txt": "Sixteen bits: ½ λ ≠ µ\n",
}


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


right = all(text_of(f"letters/{name}") == text for name, text in LETTERS.items())
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
