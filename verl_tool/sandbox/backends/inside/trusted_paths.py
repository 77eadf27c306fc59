"""Print the PATH and LD_LIBRARY_PATH of this process without folders that its user may change: standard library only.

A folder counts as changeable with all that is in it if the user owns it or one above it, or owns a file in it, or may
write to one of them.
"""

import json
import os

NAMES = ("PATH", "LD_LIBRARY_PATH")


def may_change(path):
    return os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK)


def is_trusted(folder):
    try:
        real = os.path.realpath(folder)
        above = [real]
        while above[-1] != "/":
            above.append(os.path.dirname(above[-1]))
        files = [os.path.realpath(entry.path) for entry in os.scandir(real)]
        return folder.startswith("/") and not any(
            may_change(path) for path in [*above, *(path for path in files if os.path.exists(path))]
        )
    except OSError:
        return False


def trusted(value):
    return ":".join(folder for folder in value.split(":") if is_trusted(folder))


def main():
    print(json.dumps({name: trusted(os.environ[name]) for name in NAMES if name in os.environ}), flush=True)
