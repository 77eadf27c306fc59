"""Compares the settings with the right ones."""

import json
import os
import stat
from pathlib import Path

SETTINGS = {
    "name": "gateway",
    "listen": {"host": "0.0.0.0", "port": 8443},
    "routes": [
        {"path": "/api", "target": "http://api.internal:9000", "retries": 3},
        {"path": "/static//", "target": "file:///srv/static", "cache": True},
    ],
    "motd": "Don't panic // it's fine",
    "limits": {"body": 1048576, "header": 8192, "ratio": 0.5},
    "pattern": "^\\w+$",
    "owner": None,
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


try:
    settings = json.loads(text_of("gateway.json") or "")
    right = json.dumps(settings, sort_keys=True) == json.dumps(SETTINGS, sort_keys=True)
except (ValueError, RecursionError):
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
