"""Files in one value: what goes in comes out, and what could harm is refused."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from pathlib import Path

import pytest

from verl_tool.content import packed_files
from verl_tool.content.packed_files import PackedFile, pack, pack_files, unpack
from verl_tool.errors import ConfigError

FILES = {"a.txt": PackedFile(b"a"), "data/b.bin": PackedFile(bytes(range(256))), "run.sh": PackedFile(b"#!", True)}


def tarred(*entries: tuple[str, bytes | None], mode: str = "w") -> bytes:
    """A tar of files, and of links where there is no content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for path, content in entries:
            entry = tarfile.TarInfo(path)
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content or b""))
    return buffer.getvalue()


def as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_what_is_packed_comes_out_again() -> None:
    assert unpack(pack_files(FILES)) == FILES
    assert pack_files(FILES) == pack_files(dict(reversed(FILES.items()))), "the same files give the same text"
    assert unpack(None) == {}


def test_a_folder_and_a_tar_of_it_are_packed_alike(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for path, file in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(file.content)
        (folder / path).chmod(0o755 if file.executable else 0o644)
    archive = tmp_path / "files.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, ".")
    assert unpack(pack(folder)) == FILES
    assert pack(archive) == pack(folder)


def test_inline_files() -> None:
    given = [{"path": "a.txt", "text": "ä\n", "base64": None}, {"path": "b", "base64": "AAE=", "executable": True}]
    assert unpack(given) == {"a.txt": PackedFile("ä\n".encode()), "b": PackedFile(b"\0\1", True)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("%", "is not base64"),
        (as_text(b"nothing"), "no tar, or a broken one"),
        (as_text(gzip.compress(tarred(("a", b"1")), mtime=0)[:-20]), "breaks off"),
        (as_text(tarred(("../a", b""))), r"'\.\./a' must be a plain one"),
        (as_text(tarred(("/etc/a", b""))), "'/etc/a' must be a plain one"),
        (as_text(tarred(("a", None))), "'a' is a link or a special file"),
        (as_text(tarred(("a", b"1"), ("./a", b"2"))), "'a' is there twice"),
        (as_text(tarred(("a", b"1"), ("a/b", b"2"))), "'a/b' needs a folder where the file 'a' is"),
        ([{"path": "a/../b", "text": ""}], "'a/../b' must be a plain one"),
        ([{"path": "", "text": ""}], "'' must be a plain one"),
        ([{"path": "a"}], "must have a path, and a text or a base64"),
        ([{"path": "a", "text": "", "base64": ""}], "must have a path, and a text or a base64"),
        ([{"path": "a", "text": "", "mode": 1}], "must have a path"),
        ([{"path": "a", "text": 1}], "content that is no text"),
        ({"a": "b"}, "give a text of verl_tool.content.packed_files.pack, or a list"),
        ("A" * (packed_files.MAX_PACKED_CHARACTERS + 4), "are more than 1500000"),
        ([{"path": str(i), "text": ""} for i in range(packed_files.MAX_FILES + 1)], "more than 2000 files"),
    ],
)
def test_what_cannot_be_unpacked_is_told(given: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        unpack(given)


def test_no_more_is_unpacked_than_may_be() -> None:
    many = tarred(("zeros", bytes(40 << 20)))
    with pytest.raises(ConfigError, match="more than 33554432 bytes when unpacked"):
        unpack(as_text(gzip.compress(many, 1)))
    sparse = bytearray(tarred(("a", b"")))
    sparse[124:136] = b"%011o\0" % (1 << 32)  # says that it is large
    sparse[148:156] = b"%06o\0 " % (sum(sparse[:148]) + 8 * 32 + sum(sparse[156:512]))
    with pytest.raises(ConfigError, match="4294967296 bytes, and 33554432 is the limit"):
        unpack(as_text(bytes(sparse)))


def test_what_cannot_be_packed_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is an empty folder"):
        pack(tmp_path)
    (tmp_path / "empty" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="link is a link"):
        pack(tmp_path)
    with pytest.raises(ConfigError, match="neither a folder nor a tar"):
        pack(tmp_path / "absent.tar")
