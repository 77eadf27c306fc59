"""Copy files and folders between this machine and a sandbox, as tar archives that `Sandbox.exec` transfers."""

from __future__ import annotations

import errno
import io
import posixpath
import tarfile
from pathlib import Path

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.protocol import Sandbox
from verl_tool.sandbox.result import RunResult

_PLAIN = {"LC_ALL": "C"}
_ARCHIVE = "/tmp/.verl_tool_transfer.tar"
_UNPACK = 'mkdir -p -- "$1" && tar -xof - -C "$1"'
_PACK = (
    'if [ -d "$1" ]; then cd -- "$1" && tar -chf "$2" .; else cd -- "$(dirname -- "$1")" && tar -chf "$2" -- "$3"; fi'
)


async def upload(sandbox: Sandbox, source: Path, target: str, max_bytes: int) -> None:
    """Implement `Sandbox.upload`. Links in `source` are followed."""
    into, packed = _packed(source, target, max_bytes)
    _require(await sandbox.exec(["bash", "-c", _UNPACK, "bash", into or "."], stdin=packed, env=_PLAIN), target)


async def download(sandbox: Sandbox, source: str, target: Path) -> None:
    """Implement `Sandbox.download`. Links are followed within the sandbox."""
    command = ["bash", "-c", _PACK, "bash", source, _ARCHIVE, posixpath.basename(source)]
    try:
        _require(await sandbox.exec(command, env=_PLAIN), source)
        packed = await sandbox.read_file(_ARCHIVE)
    finally:
        await sandbox.exec(["rm", "-f", _ARCHIVE])
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            _unpack(archive, target)
    except tarfile.TarError as error:
        raise OSError(errno.EIO, f"what the sandbox has packed cannot be unpacked ({error})", source) from error


def _packed(source: Path, target: str, max_bytes: int) -> tuple[str, bytes]:
    """Return the folder in which to unpack, and the archive."""
    packed = io.BytesIO()
    into, name = (target, "") if source.is_dir() else posixpath.split(target)
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        archive.add(source, arcname=name or ".", filter=_owned_by_nobody)
    if packed.tell() > max_bytes:
        raise OSError(errno.EFBIG, f"{packed.tell()} bytes are more than {max_bytes}", str(source))
    return into, packed.getvalue()


def _unpack(archive: tarfile.TarFile, target: Path) -> None:
    members = archive.getmembers()
    if len(members) == 1 and members[0].isreg():
        content = archive.extractfile(members[0])
        assert content is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.read())
        return
    # The sandbox's archive is not trusted: links, devices, and absolute or parent paths are rejected.
    plain = [member for member in members if member.isreg() or member.isdir()]
    if len(plain) < len(members):
        raise OSError(errno.EPERM, "the folder holds something that is neither file nor folder", str(target))
    target.mkdir(parents=True, exist_ok=True)
    archive.extractall(target, members=plain, filter="data")


def _owned_by_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _require(result: RunResult, path: str) -> None:
    if result.limit_hit is not None:
        raise SandboxError(f"files could not be copied within the limit {result.limit_hit}", retryable=False)
    if result.exit_code != 0:
        raise os_error(result.stderr, path)


_NUMBERS = {
    "No such file or directory": errno.ENOENT,
    "Is a directory": errno.EISDIR,
    "Not a directory": errno.ENOTDIR,
    "Permission denied": errno.EACCES,
    "Operation not permitted": errno.EPERM,
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Read-only file system": errno.EROFS,
    "File name too long": errno.ENAMETOOLONG,
    "Argument list too long": errno.ENAMETOOLONG,
    "Invalid argument": errno.EINVAL,
    "Too many levels of symbolic links": errno.ELOOP,
}


def os_error(message: str, path: str) -> OSError:
    """Convert a program's error message about a file (with ``LC_ALL=C``) to the error that `open` would raise."""
    for words, number in _NUMBERS.items():
        if words in message:
            return OSError(number, words, path)
    return OSError(errno.EIO, message.strip()[-200:] or "the file could not be read or written", path)
