"""An image of this machine's own programs, for containers where no registry is reached: nothing is fetched.

    python examples/train/machine_image.py --engine podman --image localhost/verl-tool-machine:1 --output outputs/image

An image of another name than `NAME` must be there, or is pulled.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from verl_tool.errors import SandboxError, VerlToolError
from verl_tool.sandbox.backends.providers.command_line import CommandLineProvider

NAME = "localhost/verl-tool-machine:1"
_PROGRAMS = """
    bash sh cat chmod chown cp cut date dirname basename du env expr false find git grep head id kill
    ln ls mkdir mkfifo mktemp mv nohup od printenv printf pwd readlink realpath rm rmdir sed seq
    setsid sleep sort stat stty tail tar tee timeout touch tr true tty uname uniq wc which whoami
    xargs yes diff cmp patch gzip ps awk
""".split()  # noqa: SIM905  (a list would be sixty lines)
_ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_LOADED_BY_OTHERS = ("librt.so.1", "libpthread.so.0", "libdl.so.2", "libgcc_s.so.1", "libstdc++.so.6", "libresolv.so.2")
"""Libraries that no program here needs, but agents that are mounted do."""
_LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "ensurepip",
    "turtledemo",
    "lib2to3",
}
_IMPORT_SECONDS = 240


def build(command: str) -> None:
    """Make the image, unless it is there. command: docker or podman. Raises CalledProcessError, TimeoutExpired, and
    SandboxError on other systems than Linux, whose programs no container runs."""
    if sys.platform != "linux":
        raise SandboxError(f"{NAME} is made of programs of Linux; name another image, such as python:3.12-slim", False)
    with open(Path(tempfile.gettempdir()) / f"verl-tool-machine-image-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run([command, "image", "inspect", NAME], capture_output=True, check=False).returncode == 0:
            return
        changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin", "ENV LD_LIBRARY_PATH=/usr/local/lib", "WORKDIR /srv"]
        options = [word for change in changes for word in ("--change", change)]
        with tempfile.TemporaryFile() as file:
            _write(file)
            file.seek(0)
            subprocess.run(
                [command, "import", *options, "-", NAME],
                stdin=file,
                capture_output=True,
                check=True,
                timeout=_IMPORT_SECONDS,
            )


def _write(file: object) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:  # type: ignore[call-overload]
        for folder in ("tmp", "root", "srv", "proc", "dev", "sys", "run", "etc", "usr/bin", "usr/local/bin", "usr/lib"):
            _folder(archive, folder)
        for link, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib")):
            _link(archive, link, target)
        for name, text in _ACCOUNTS.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        libraries: dict[str, str] = {}
        python = os.path.realpath(sys.executable)
        for name in _PROGRAMS:
            found = shutil.which(name, path="/usr/bin:/bin")
            if found is not None:
                archive.add(os.path.realpath(found), f"usr/bin/{name}", filter=_of_root)
                libraries |= _libraries(found)
        archive.add(python, f"usr/local/bin/{_PYTHON}", filter=_of_root)
        _link(archive, "usr/local/bin/python3", _PYTHON)
        standard = Path(sys.base_prefix) / "lib" / _PYTHON
        archive.add(standard, f"usr/local/lib/{_PYTHON}", filter=_of_the_library)
        for extension in (standard / "lib-dynload").glob("*.so"):
            libraries |= _libraries(str(extension))
        libraries |= _libraries(python)
        beside = Path(os.path.realpath(libraries["libc.so.6"])).parent
        libraries |= {name: str(beside / name) for name in _LOADED_BY_OTHERS if (beside / name).exists()}
        for name, path in libraries.items():
            folder = "usr/local/lib" if "libpython" in name else "usr/lib"
            archive.add(os.path.realpath(path), f"{folder}/{name}", filter=_of_root)


def _libraries(program: str) -> dict[str, str]:
    """Paths of the shared libraries of a program, by their names."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(/\S+)\s+\(0x", listed)
    return {Path(path).name: path for path in found}


def _folder(archive: tarfile.TarFile, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    archive.addfile(member)


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    archive.addfile(member)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _of_the_library(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT & set(member.name.split("/")) else _of_root(member)


def main(
    engine: Annotated[str, typer.Option("--engine", help="docker or podman; of the sandbox nothing is made.")],
    image: Annotated[str, typer.Option("--image", help=f"Its name; {NAME} is made here, others are pulled.")] = NAME,
    output: Annotated[
        Path | None, typer.Option("--output", help="A folder for the image's name, written when the image is there.")
    ] = None,
) -> None:
    """See that the engine has the image of a recipe's containers."""
    try:
        if engine != "sandbox":
            if image == NAME:
                build(engine)
            asyncio.run(CommandLineProvider(engine).describe(image))
    except (VerlToolError, subprocess.SubprocessError, OSError) as error:
        printed = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
        reason = printed.decode(errors="replace").strip()[-500:] or str(error)
        words = f"no image {image}: {reason}; name another one with IMAGE, or take the sandbox with ENGINE=sandbox"
        Console(stderr=True).print(f"[red]{escape(words)}[/red]", soft_wrap=True)
        raise typer.Exit(1) from None
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "image.txt").write_text(f"{'none: sandbox' if engine == 'sandbox' else image}\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
