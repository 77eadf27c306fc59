"""Print the PATH and LD_LIBRARY_PATH of this process without folders that programs may have changed: standard library
only.

A folder that the user may change counts with all that is in it: the user owns it or one above it, or owns a file in it,
or may write to one of them.
"""

import json
import os

NAMES = ("PATH", "LD_LIBRARY_PATH")


def may_change(path):
    return os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK)


def is_within(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def is_trusted(folder, changed, owned):
    """changed: folders that are not to be trusted. owned: nor are those that the user may change."""
    try:
        real = os.path.realpath(folder)
        above = [real]
        while above[-1] != "/":
            above.append(os.path.dirname(above[-1]))
        files = [os.path.realpath(entry.path) for entry in os.scandir(real)] if owned else []
        return (
            folder.startswith("/")
            and not any(is_within(path, changed) for path in (os.path.normpath(folder), real))
            and not any(
                owned and may_change(path) for path in [*above, *(path for path in files if os.path.exists(path))]
            )
        )
    except OSError:
        return False


def trusted(value, changed, owned):
    return ":".join(folder for folder in value.split(":") if is_trusted(folder, changed, owned))


def main(changed, owned):
    found = {name: trusted(os.environ[name], changed, owned) for name in NAMES if name in os.environ}
    print(json.dumps(found), flush=True)
