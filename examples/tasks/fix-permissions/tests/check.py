"""Compares modes and content of all files."""

import os
import stat
from pathlib import Path

FILES = {
    "bin/start.sh": "#!/bin/sh\necho starting\n",
    "bin/stop.sh": "#!/bin/sh\necho stopping\n",
    "bin/lib/common.sh": 'log() { echo "$*"; }\n',
    "keys/server.pem": "not a real key: 5f0c\n",
    "keys/old/client.pem": "not a real key: 91aa\n",
    "docs/example.sh": "#!/bin/sh\necho example\n",
    "docs/index.txt": "see bin\n",
    "data/a b.txt": "blank\n",
}
SCRIPTS = ("bin/start.sh", "bin/stop.sh")


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


def mode_of(path):
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return stat.S_IMODE(found.st_mode) if not stat.S_ISLNK(found.st_mode) else None


def expected_mode(path):
    return 0o600 if path.endswith(".pem") else 0o755 if path in SCRIPTS else 0o644


right = all(mode_of(path) == expected_mode(path) and text_of(path) == text for path, text in FILES.items())
right = right and mode_of("keys") == mode_of("keys/old") == 0o700
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
