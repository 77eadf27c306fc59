"""Read and write the files of a live session from outside, without following links."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Iterator

from verl_tool.sandbox.inside import wire

FOLDERS = ("work", "tmp", "shm")
_OWN = {wire.WORK_DIRECTORY: "work", "/tmp": "tmp", "/box/tmp": "tmp", "/dev/shm": "shm", "/box/shm": "shm"}
_LINKED = {link: target.removeprefix("box/") for link, target in wire.LINKS.items()}
_AT = {**_LINKED, **_OWN, wire.VERIFIER_DIRECTORY: "verifier"}
"""Folders of a session, by their paths for its programs."""


class SessionFiles:
    """The folders of one session. Call `close` afterwards."""

    def __init__(self, folder_fd: int, max_bytes: int) -> None:
        """`folder_fd` is a descriptor of the parent folder, and `max_bytes` the maximum size of one file."""
        self._folder_fd = folder_fd
        self._max_bytes = max_bytes
        self._shown = 0

    def close(self) -> None:
        os.close(self._folder_fd)

    def read(self, path: str) -> bytes:
        """Read a regular file. See `Session.read_file`."""
        with _opened(self._folder_fd, _parts(path), os.O_RDONLY, path) as fd:
            size = os.fstat(fd).st_size
            if size > self._max_bytes:
                raise OSError(errno.EFBIG, f"{size} bytes are more than {self._max_bytes}", path)
            return os.pread(fd, size, 0)

    def write(self, path: str, content: bytes) -> None:
        """Write a file, and replace an existing one. See `Session.write_file`."""
        parts = _parts(path)
        if len(content) > self._max_bytes:
            raise OSError(errno.EFBIG, f"{len(content)} bytes are more than {self._max_bytes}", path)
        self._make_folders(parts, path)
        with _opened(self._folder_fd, parts, os.O_WRONLY | os.O_CREAT, path) as fd:
            self._give_to_owner(fd)
            os.ftruncate(fd, 0)
            at = 0
            while at < len(content):
                at += os.pwrite(fd, content[at:], at)

    def open_pipe(self, path: str, flags: int) -> int:
        """Open a named pipe without blocking. Raises OSError if it does not exist, or has no reader."""
        parts = _parts(path)
        with _folder(self._folder_fd, parts[:-1], path) as folder:
            fd = _open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, folder, path)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a named pipe", path)
        return fd

    def whole(self) -> bool:
        """Return whether its folders are folders, not links."""
        try:
            modes = [os.stat(name, dir_fd=self._folder_fd, follow_symlinks=False).st_mode for name in FOLDERS]
        except OSError:
            return False
        return all(map(stat.S_ISDIR, modes))

    def show(self, number: int) -> None:
        """Move the folders of a branch to the session's paths, and those of the current branch aside.

        `number` is 0 for the original session. Raises OSError if programs of the session prevent it by other files.
        """
        if number == self._shown:
            return
        for name in FOLDERS:
            aside = wire.BRANCH_FOLDER.format(number=self._shown, name=name)
            own = wire.BRANCH_FOLDER.format(number=number, name=name)
            os.rename(name, aside, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
            os.rename(own, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        self._shown = number

    def _make_folders(self, parts: list[str], path: str) -> None:
        for count in range(2, len(parts)):
            with _folder(self._folder_fd, parts[: count - 1], path) as above, contextlib.suppress(FileExistsError):
                os.mkdir(parts[count - 1], 0o755, dir_fd=above)
                with _folder(above, parts[count - 1 : count], path, readable=True) as made:
                    self._give_to_owner(made)

    def _give_to_owner(self, fd: int) -> None:
        owner = os.fstat(self._folder_fd)
        if os.fstat(fd).st_uid != owner.st_uid:
            os.fchown(fd, owner.st_uid, owner.st_gid)


def _parts(path: str) -> list[str]:
    """Split a path into its parts below the parent folder. Raises PermissionError if it is outside the folders."""
    whole = posixpath.normpath(posixpath.join(wire.WORK_DIRECTORY, path))
    for folder, name in _AT.items():
        if whole.startswith(folder + "/") and "\0" not in whole:
            return [name, *whole[len(folder) + 1 :].split("/")]
    raise PermissionError(errno.EACCES, f"not a file in the session's folder {wire.WORK_DIRECTORY} or in /tmp", path)


@contextlib.contextmanager
def _folder(folder_fd: int, parts: list[str], path: str, *, readable: bool = False) -> Iterator[int]:
    """Open a folder below another one."""
    at = os.dup(folder_fd)
    try:
        for part in parts:
            flags = (0 if readable else os.O_PATH) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            following = _open(part, flags, at, path)
            os.close(at)
            at = following
        yield at
    finally:
        os.close(at)


@contextlib.contextmanager
def _opened(folder_fd: int, parts: list[str], flags: int, path: str) -> Iterator[int]:
    """Open a regular file."""
    with _folder(folder_fd, parts[:-1], path) as folder:
        # O_NONBLOCK: opening a fifo must not block.
        fd = _open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, folder, path)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(kind):
            raise PermissionError(errno.EACCES, "not a plain file", path)
        yield fd
    finally:
        os.close(fd)


def _open(name: str, flags: int, folder_fd: int, path: str) -> int:
    try:
        return os.open(name, flags, 0o644, dir_fd=folder_fd)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None  # with the path that was asked for
