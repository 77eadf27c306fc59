"""Compares the settings with the right ones."""

import configparser
import os
import stat
from pathlib import Path

RIGHT = {
    "server": {"host": "0.0.0.0", "port": "8000", "workers": "6"},
    "log": {"level": "debug, %(name)s", "format": "long"},
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


settings = configparser.ConfigParser(interpolation=None)
try:
    settings.read_string(text_of("settings.ini") or "")
    right = {name: dict(settings[name]) for name in settings.sections()} == RIGHT
except configparser.Error as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
