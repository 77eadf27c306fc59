"""Files in one value that travels as JSON and fits a column of a data set: of a workspace, or of its verifier.

    packed = pack(Path("task/files"))           # a folder or a tar file, as text
    files = unpack(packed)                      # {"data/in.csv": PackedFile(b"a,b\\n"), ...}
    files = unpack([{"path": "in.csv", "text": "a,b\\n"}, {"path": "logo.png", "base64": "iVBORw0..."}])

The text is base64 of a tar, compressed with gzip. It holds plain files only: a link could lead out of the folder in
which it is unpacked, and an empty folder would be lost, so that both are refused.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_tool.errors import ConfigError

MAX_PACKED_CHARACTERS = 1_500_000
"""Of the text, or of all inline texts together: two such values and a call fit into one request's body."""
MAX_UNPACKED_BYTES = 32 << 20
"""Of all files together."""
MAX_FILES = 2000
_GZIP = b"\x1f\x8b"
_BLOCKS_BYTES = 1024
"""What a tar has for each file beside its content, and at its end."""


@dataclass(frozen=True)
class PackedFile:
    """One file."""

    content: bytes
    executable: bool = False


def pack(source: Path) -> str:
    """The files of a folder, or of a tar file (plain or compressed with gzip), as text. The same files give one text.

    Raises ConfigError that names what cannot be packed: a link, an empty folder, too much of anything.
    """
    if source.is_dir():
        return pack_files(_files_of(source))
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"{source} is neither a folder nor a tar file: {error.strerror}") from None
    return pack_files(_files_in(content, str(source)))


def pack_files(files: Mapping[str, PackedFile]) -> str:
    """`files`, by their paths, as text. Raises ConfigError."""
    _check(files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(files[path].content), 0o755 if files[path].executable else 0o644
            tar.addfile(entry, io.BytesIO(files[path].content))
    text = base64.b64encode(gzip.compress(buffer.getvalue(), mtime=0)).decode("ascii")
    if len(text) > MAX_PACKED_CHARACTERS:
        raise ConfigError(
            f"the files are {len(text)} characters when packed, and at most {MAX_PACKED_CHARACTERS} travel with a row; "
            "leave out what the task does not need"
        )
    return text


def unpack(packed: object) -> dict[str, PackedFile]:
    """The files by their paths, of a text of `pack` or a list of inline files; None: no files.

    An inline file is ``{"path": …}`` with ``text`` or ``base64``, and ``executable`` if it is. Raises ConfigError that
    says what is wrong with which file.
    """
    if packed is None:
        return {}
    if isinstance(packed, str):
        return _files_in(_decoded(packed, "the files", MAX_PACKED_CHARACTERS), "the files")
    entries = packed.tolist() if hasattr(packed, "tolist") else packed  # numpy's arrays, as pandas reads parquet
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(
            f"the files are {packed!r:.80}; give a text of verl_tool.content.packed_files.pack, or a list of files"
        )
    files: dict[str, PackedFile] = {}
    for entry in entries:
        path, file = _inline(entry)
        _add(files, path, file)
    _check(files)
    return files


def _inline(entry: Mapping[str, object]) -> tuple[str, PackedFile]:
    provided = {name: value for name, value in entry.items() if value is not None}  # parquet fills gaps with None
    path, text, data = provided.pop("path", None), provided.pop("text", None), provided.pop("base64", None)
    executable = provided.pop("executable", False)
    if provided or not isinstance(path, str) or not isinstance(executable, bool) or (text is None) == (data is None):
        raise ConfigError(f"the file {entry!r:.80} must have a path, and a text or a base64; it may be executable")
    if isinstance(text, str):
        return path, PackedFile(text.encode("utf-8", "surrogatepass"), executable)
    if isinstance(data, str):
        return path, PackedFile(_decoded(data, f"the file {path!r}", MAX_PACKED_CHARACTERS), executable)
    raise ConfigError(f"the file {path!r:.80} has content that is no text")


def _decoded(text: str, what: str, most: int) -> bytes:
    if len(text) > most:
        raise ConfigError(f"{what}: {len(text)} characters are more than {most}; leave out what is not needed")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"{what}: {text!r:.40} is not base64; pack files with verl_tool.content.packed_files.pack"
        ) from None


def _files_in(content: bytes, what: str) -> dict[str, PackedFile]:
    """The files of a tar."""
    files: dict[str, PackedFile] = {}
    size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(_decompressed(content, what)), mode="r:") as tar:
            for entry in tar:
                if entry.isdir():
                    continue
                size += entry.size  # as it says: a sparse file's content is made when it is read
                _check_size(size)
                reader = tar.extractfile(entry) if entry.isreg() else None
                if reader is None:
                    raise ConfigError(
                        f"{what}: {entry.name!r} is a link or a special file; only plain files are packed"
                    )
                _add(files, entry.name.removeprefix("./"), PackedFile(reader.read(), bool(entry.mode & stat.S_IXUSR)))
    except ConfigError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: no tar, or a broken one: {error}") from None
    _check(files)
    return files


def _decompressed(content: bytes, what: str) -> bytes:
    if not content.startswith(_GZIP):
        return content
    maximum = MAX_UNPACKED_BYTES + _BLOCKS_BYTES * (MAX_FILES + 1)
    machine = zlib.decompressobj(wbits=31)
    plain = machine.decompress(content, maximum + 1)
    if len(plain) > maximum:
        raise ConfigError(f"{what}: more than {MAX_UNPACKED_BYTES} bytes when unpacked; leave out what is not needed")
    if not machine.eof:
        raise ConfigError(f"{what}: the compressed tar breaks off")
    return plain


def _files_of(folder: Path) -> dict[str, PackedFile]:
    """The files below a folder."""
    files: dict[str, PackedFile] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            if not any(path.iterdir()):
                raise ConfigError(f"{path} is an empty folder, which cannot be packed; put a file into it, as .gitkeep")
        elif not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is a link or a special file; only plain files are packed")
        else:
            _check_size(sum(len(file.content) for file in files.values()) + path.lstat().st_size)
            _add(files, name, PackedFile(path.read_bytes(), bool(mode & stat.S_IXUSR)))
    return files


def _add(files: dict[str, PackedFile], path: str, file: PackedFile) -> None:
    if path in files:
        raise ConfigError(f"the file {path!r:.80} is there twice")
    if len(files) >= MAX_FILES:
        raise ConfigError(f"there are more than {MAX_FILES} files; leave out what is not needed")
    files[path] = file


def _check(files: Mapping[str, PackedFile]) -> None:
    """Raises ConfigError if a path would leave the folder, or the files are too large."""
    for path in files:
        wrong = not path or "\0" in path or path.startswith("/") or posixpath.normpath(path) != path
        if wrong or path.split("/")[0] in (".", ".."):
            raise ConfigError(f"the path {path!r:.80} must be a plain one within the folder, as 'data/in.csv'")
    _reject_file_as_folder(files)
    _check_size(sum(len(file.content) for file in files.values()))


def _reject_file_as_folder(paths: Iterable[str]) -> None:
    known = set(paths)
    for path in known:
        for above in Path(path).parents:
            if above.as_posix() in known:
                raise ConfigError(f"the file {path!r:.80} needs a folder where the file {above.as_posix()!r:.80} is")


def _check_size(size: int) -> None:
    if size > MAX_UNPACKED_BYTES:
        raise ConfigError(
            f"the files are {size} bytes, and {MAX_UNPACKED_BYTES} is the limit; leave out what is not needed"
        )
