"""Compares the clerk's file with root's."""

import os
import stat
from pathlib import Path

MAX_BYTES = 10_000
try:
    with open(os.open("owed.csv", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = file.read(MAX_BYTES) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
except OSError as error:
    print(error)
    found = b""
wanted = Path("/srv/closed/owed.csv").read_bytes()
right = found.replace(b"\r\n", b"\n").strip() == wanted.strip()
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
