"""Print the PATH and LD_LIBRARY_PATH of this process without folders whose programs a trajectory may have changed:
standard library only.

A folder and each entry of it are followed name by name, as the kernel does. Whoever may change a folder on the way can
replace what lies behind it, so all of them must be out of the user's reach, and the file at the end too.
"""

import json
import os
import stat

NAMES = ("PATH", "LD_LIBRARY_PATH")
_MAX_HOPS = 40
"""Links that the kernel follows for one path."""
_ACCESS_LIST = "system.posix_acl_access"


class Untrusted(Exception):
    """A trajectory may have changed what is there."""


def is_within(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


class Reach:
    """What a trajectory may have changed."""

    def __init__(self, folders, user, groups):
        """folders: with all that is in them. user, groups: numbers of who may have changed more; user None: nobody."""
        self._folders = {each(folder) for folder in folders for each in (os.path.normpath, os.path.realpath)}
        self._user, self._groups = user, groups
        self._known = {}

    def has(self, path):
        """Return whether a path, which may be a link, is in one of the folders."""
        return is_within(path, self._folders)

    def reject(self, path):
        """Raise Untrusted if it may have been changed. path: a real one."""
        if path not in self._known:
            try:
                self._known[path] = self.has(path) or (self._user is not None and self._may_change(path))
            except OSError:
                self._known[path] = True
        if self._known[path]:
            raise Untrusted(path)

    def _may_change(self, path):
        found = os.stat(path)
        try:
            has_list = _ACCESS_LIST in os.listxattr(path)
        except OSError:
            has_list = False
        writers = (found.st_mode & stat.S_IWOTH) | (found.st_mode & stat.S_IWGRP if found.st_gid in self._groups else 0)
        return found.st_uid == self._user or bool(writers) or has_list


def follow(path, reach):
    """Return where a path leads. Raise Untrusted if a trajectory may have changed that, and OSError if nothing is
    there."""
    if not path.startswith("/"):
        raise Untrusted(path)
    waiting, current, hops = path.split("/")[::-1], "/", 0
    while waiting:
        name = waiting.pop()
        if name in ("", "."):
            continue
        reach.reject(current)
        if name == "..":
            current = os.path.dirname(current)
            continue
        current = os.path.join(current, name)
        if reach.has(current):
            raise Untrusted(path)
        if stat.S_ISLNK(os.lstat(current).st_mode):
            hops += 1
            if hops > _MAX_HOPS:
                raise Untrusted(path)
            target = os.readlink(current)
            current = "/" if target.startswith("/") else os.path.dirname(current)
            waiting.extend(target.split("/")[::-1])
    reach.reject(current)
    return current


def is_trusted(folder, reach):
    try:
        real = follow(folder, reach)
        names = os.listdir(real)
    except (OSError, Untrusted):
        return False
    for name in names:
        try:
            follow(f"{real}/{name}", reach)
        except OSError:  # nothing is there, and nobody can put something there
            continue
        except Untrusted:
            return False
    return True


def main(changed, user, groups):
    reach = Reach(changed, user, groups)
    found = {
        name: ":".join(folder for folder in os.environ[name].split(":") if is_trusted(folder, reach))
        for name in NAMES
        if name in os.environ
    }
    print(json.dumps(found), flush=True)
