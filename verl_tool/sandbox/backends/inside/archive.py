"""Pack folders of a container and unpack them in another one: standard library only, no import of this project.

Files of all modes, links, hard links, times, and owners where the user may set them. Pipes, sockets and devices are
left out. What the user itself may not read is made readable first.
"""

import os
import shutil
import stat
import sys
import tarfile

_READABLE = {stat.S_IFDIR: 0o500, stat.S_IFREG: 0o400}


def pack(folders):
    """Write a tar of what is in absolute `folders` to stdout."""
    with tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        waiting = list(folders)
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if _add(archive, entry):
                        waiting.append(entry.path)


def _add(archive, entry):
    """Whether it is a folder."""
    mode = entry.stat(follow_symlinks=False).st_mode
    kind = stat.S_IFMT(mode)
    needed = _READABLE.get(kind, 0)
    if mode & needed != needed:
        os.chmod(entry.path, stat.S_IMODE(mode) | needed)
    if kind not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK):
        return False
    member = archive.gettarinfo(entry.path)
    if member.isreg():
        with open(entry.path, "rb") as file:
            archive.addfile(member, file)
    else:
        archive.addfile(member)
    return kind == stat.S_IFDIR


def unpack(folders):
    """Unpack a tar from stdin. folders: to be emptied first."""
    for folder in folders:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    with tarfile.open(fileobj=os.fdopen(0, "rb"), mode="r|") as archive:
        archive.extraction_filter = lambda member, path: member
        archive.extractall("/")


def run(action, *arguments):
    """End with the error as the only line on stderr."""
    try:
        if action == "pack":
            pack(*arguments)
        else:
            unpack(*arguments)
    except (OSError, tarfile.TarError, RecursionError) as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
