"""Compares modes, the link and the content of the home."""

import os
import stat
from pathlib import Path

MODES = {"spool": 0o2770, "secrets": 0o700, "run.sh": 0o755}
RELEASES = ["1.10.0", "1.2.0", "1.9.3"]


def mode_of(path):
    found = os.lstat(path)
    return None if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode)


try:
    right = all(mode_of(path) == mode for path, mode in MODES.items())
    right = right and mode_of("secrets/token") & 0o377 == 0 and stat.S_ISREG(os.lstat("secrets/token").st_mode)
    right = right and os.path.normpath(os.readlink("current")) == "releases/1.10.0"
    right = right and sorted(os.listdir("releases")) == RELEASES
    right = right and Path("secrets/token").read_bytes()[:100] == b"t0k3n\n"
except OSError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
