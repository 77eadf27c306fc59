"""Check the files of a workspace before its verifier reads them: standard library only, no import of this project.

Runs in the workspace or in the verifier's copy of it, as the user of the workspace.
"""

import os
import stat
import time

_MAX_HOPS = 40
"""Links that the kernel follows for one path."""
_MAX_BELOW = 10_000
"""Files and folders that are looked at below a link."""
_MAX_NAMES = 3_000_000
"""In the paths that all links lead through, which take about 10 microseconds each."""
_READABLE = 0o500
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))
"""In names of ``/proc/self/mountinfo``."""


def within(path, folders):
    return any(folder == "/" or path == folder or path.startswith(folder + "/") for folder in folders)


class Names:
    """How many names of paths may still be followed."""

    def __init__(self):
        self.left = _MAX_NAMES


def leads_outside(path, own, outside, names):
    """Return whether an absolute path leads, at its end or on its way, to a folder of `outside` that is not within
    `own`. It is followed link by link: a link in /proc leads elsewhere for another process. Raises RuntimeError where
    no more `names` may be followed."""
    waiting, current, hops = path.split("/")[::-1], "/", 0
    while waiting:
        name = waiting.pop()
        names.left -= 1
        if names.left < 0:
            raise RuntimeError("the links take too long to follow")
        if name in ("", "."):
            continue
        if name == "..":
            current = os.path.dirname(current)
            continue
        current = os.path.join(current, name)
        on_the_way = within(current, own) or any(within(folder, (current,)) for folder in own)
        if within(current, outside) and not on_the_way:
            return True
        try:
            target = os.readlink(current)
        except OSError:
            continue
        hops += 1
        if hops > _MAX_HOPS:
            return False
        current = "/" if target.startswith("/") else os.path.dirname(current)
        waiting.extend(target.split("/")[::-1])
    return not within(current, own) and (
        within(current, outside) or any(within(folder, (current,)) for folder in outside)
    )


def clean(folders, outside, owner):
    """Remove from `folders` what is neither file, folder nor link, and links that lead `outside`, and such links of the
    user `owner`, unless it is None, from the rest of the root file system. Raises RuntimeError if a folder itself leads
    there."""
    own, names = tuple(os.path.realpath(folder) for folder in folders), Names()
    for folder in folders:
        if leads_outside(folder, folders, outside, names):
            raise RuntimeError(f"{folder} is a link that leads to files of the verifier or of processes")
    for folder in own:
        for _, entries in _walk(folder, (), True):
            for entry in entries:
                if not _may_stay(entry, own, outside, names):
                    _remove(entry)
    if owner is not None:
        for _, entries in _walk("/", {*_mount_points(), *own}, True):
            for entry in entries:
                if entry.is_symlink() and _is_of(entry, owner) and leads_outside(entry.path, own, outside, names):
                    _remove(entry)


def remove_closed_links(folders, seconds):
    """Remove links from `folders`, and of this process's user from everywhere, that lead to what it cannot read: a
    verifier that is root can. Raises RuntimeError if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    for folder in (*folders, "/"):
        for _, entries in _walk(folder, _mount_points() if folder == "/" else (), True):
            for entry in entries:
                if entry.is_symlink() and (folder != "/" or _is_of(entry, os.geteuid())) and _is_closed(entry.path):
                    _remove(entry)
                if time.monotonic() > deadline:
                    raise RuntimeError("the links take too long to follow")


def _is_closed(path):
    """Return whether a link leads to what this user cannot read, or to a folder of others with something like that in
    it, or with more than what is looked at."""
    try:
        found = os.stat(path)
    except PermissionError:
        return True
    except OSError:
        return False  # nothing is there
    if not stat.S_ISDIR(found.st_mode):
        return not os.access(path, os.R_OK)
    waiting, count = [path], 0
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    count += 1
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if count > _MAX_BELOW or not _may_read(entry, is_folder):
                        return True
                    if is_folder:
                        waiting.append(entry.path)
        except OSError:
            return True
    return False


def _may_read(entry, is_folder):
    return entry.is_symlink() or os.access(entry.path, os.R_OK | os.X_OK if is_folder else os.R_OK)


def _may_stay(entry, own, outside, names):
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except PermissionError:
        return True  # nor can the verifier reach it
    if stat.S_ISLNK(mode):
        return not leads_outside(entry.path, own, outside, names)
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def is_large(folders, max_bytes, max_files, since=0.0):
    """Return whether `folders` have more than so many bytes or files. In ``/`` only what this process's user may have
    written counts: its files, for root those of all, that were changed after the time `since`, which a program cannot
    set."""
    size = count = 0
    for folder in folders:
        is_root = folder == "/"
        for path, entries in _walk(folder, _mount_points() if is_root else (), not is_root):
            try:
                found = os.stat(path)
            except PermissionError:
                continue
            except OSError:
                return True  # too long
            own = found.st_uid == os.geteuid()
            if own and found.st_mode & _READABLE != _READABLE:
                return True  # what is in it is not known
            counted = [found for found in map(_stat, entries) if found is not None]
            if is_root:
                is_any = os.geteuid() == 0  # who can give its files to others
                counted = [f for f in counted if (is_any or f.st_uid == os.geteuid()) and f.st_ctime >= since]
            size, count = size + sum(each.st_size for each in counted), count + len(counted)
            if size > max_bytes or count > max_files:
                return True
    return False


def _walk(folder, skipped=(), make_readable=False):
    """The folder and those below it, but none of `skipped`, each with its entries."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        if make_readable:
            _make_readable(path)
        entries = _scanned(path)
        yield path, entries
        waiting.extend(e.path for e in entries if e.is_dir(follow_symlinks=False) and e.path not in skipped)


def _make_readable(path):
    try:
        found = os.stat(path)
        if found.st_uid == os.geteuid() and found.st_mode & _READABLE != _READABLE:
            os.chmod(path, stat.S_IMODE(found.st_mode) | _READABLE)
    except OSError:
        pass


def _scanned(path):
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []  # not this user's, or too long to be opened


def _is_of(entry, user):
    found = _stat(entry)
    return found is not None and found.st_uid == user


def _stat(entry):
    try:
        return entry.stat(follow_symlinks=False)
    except PermissionError:
        return None


def _remove(entry):
    """Raises OSError unless neither the entry nor its folder is this user's."""
    try:
        os.unlink(entry.path)
    except PermissionError:
        folder = os.path.dirname(entry.path)
        found = os.stat(folder)
        if found.st_uid == os.geteuid():
            os.chmod(folder, stat.S_IMODE(found.st_mode) | 0o700)
            os.unlink(entry.path)
            os.chmod(folder, stat.S_IMODE(found.st_mode))
        elif _is_of(entry, os.geteuid()):
            raise


def _mount_points():
    """Decoded by hand: a codec would be a module that this process may not be able to read, or that was changed."""
    with open("/proc/self/mountinfo", "rb") as file:
        points = [os.fsdecode(line.split()[4]) for line in file]
    for escaped, plain in _ESCAPES:
        points = [point.replace(escaped, plain) for point in points]
    return {point for point in points if point != "/"}
