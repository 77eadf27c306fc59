"""Pack folders of a container and unpack them in another one: standard library only, no import of this project.

Files of all modes, links, hard links, times, and owners where the user may set them. Pipes, sockets and devices are
left out. What the user itself may not read is made readable first. The archive is not trusted where it is unpacked: a
member outside the folders is an error.
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


def unpack(folders, replaced):
    """Unpack a tar from stdin into absolute `folders`. replaced: those to be emptied first. Raises tarfile.TarError if
    it would change anything else."""
    for folder in replaced:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    with tarfile.open(fileobj=os.fdopen(0, "rb"), mode="r|") as archive:
        archive.extraction_filter = lambda member, path: member
        archive.extractall("/", _Inside(folders).checked(archive))


class _Inside:
    """What an archive may contain, while it is unpacked."""

    def __init__(self, folders):
        named = ("/" + folder.strip("/") for folder in folders)
        self._folders = {folder: os.path.realpath(folder) for folder in named}
        self._parents = set()
        """Folders that have been checked. No member can take their place."""

    def checked(self, members):
        for member in members:
            path = self._path(member.name)
            expected = member.isreg() or member.isdir() or member.issym() or member.islnk()
            if not expected or (os.path.islink(path) and not member.issym()):
                raise tarfile.TarError(f"{path}: this kind of file is not expected")
            if member.islnk():
                target = self._path(member.linkname)
                if os.path.islink(target) or not os.path.isfile(target):
                    raise tarfile.TarError(f"{path}: a link to {target}")
            yield member

    def _path(self, name):
        """Where a name leads, which is below one of the folders and not behind a link."""
        path = os.path.normpath("/" + name.strip("/"))
        parent = os.path.dirname(path)
        above = [folder for folder in self._folders if f"{parent}/".startswith(f"{folder}/")]
        if ".." in name.split("/") or not above:
            raise tarfile.TarError(f"/{name}: not in {', '.join(self._folders)}")
        if parent not in self._parents:
            folder = max(above, key=len)
            if not os.path.isdir(parent) or os.path.realpath(parent) != self._folders[folder] + parent[len(folder) :]:
                raise tarfile.TarError(f"{path}: behind a link")
            self._parents.add(parent)
        return path


def run(action, *arguments):
    """End with the error as the only line on stderr."""
    # Looking up the names of owners may load libraries that the container's files name (/etc/nsswitch.conf).
    vars(tarfile).update(pwd=None, grp=None)
    try:
        if action == "pack":
            pack(*arguments)
        else:
            unpack(*arguments)
    except (OSError, tarfile.TarError, RecursionError) as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
