"""Build images with the command line of docker or podman, once per content.

    builder = ImageBuilder("podman", network="host")
    image = await builder.build(Path("task/environment"), seconds=600)      # localhost/verl-tool-task:3f2a...

The tag is the hash of what the image is built from. If the engine has the image, nothing is built, in this process and
in later ones. A base image that has changed under the same name is not noticed: remove the image to build it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import stat
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox.backends.dockerfile import replace_base_images
from verl_tool.sandbox.backends.engine import NETWORK_PREFIXES, ContainerEngine, end
from verl_tool.sandbox.backends.inside.resident import descendants
from verl_tool.sandbox.backends.providers import find_provider
from verl_tool.sandbox.backends.settings import ImageSettings

REPOSITORY = "localhost/verl-tool-task"
_QUESTION_SECONDS = 60.0
_ABSENT = ("no such image", "no such object", "image not known")
"""In what docker and podman say of an image that they do not have."""
_READ_BYTES = 1 << 16
_TAIL_BYTES = 3000
"""Bytes of the end of a build's output that an error contains."""
_STOP_SECONDS = 10.0
"""Time for a build to clean up after SIGTERM."""
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
"""Build arguments that every Dockerfile has, and that change neither the image nor the engine's cache."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


def ignore_progress(line: str) -> None:
    """Do nothing with a line of a build's output."""


class ImageBuilder:
    """Builds images, a limited number at once. Equal contexts are built once."""

    def __init__(
        self,
        command: str,
        *,
        network: str = "none",
        base_images: Mapping[str, str] = _NOTHING,
        max_builds: int = 2,
    ) -> None:
        """Find the command line.

        Args:
            command: ``docker`` or ``podman``.
            network: of ``RUN``: ``none``, ``host``, or another that the engine knows. With a network, the proxy
                variables of this process are passed on.
            base_images: images to use in the place of others in ``FROM``, see `replace_base_images`.
            max_builds: number of builds at once.

        Raises ConfigError if there is no such program.
        """
        self.engine, self._provider = ContainerEngine(command, NETWORK_PREFIXES), find_provider(command)
        self.network, self._base_images = network, base_images
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(max_builds)

    async def build(
        self,
        context: Path,
        dockerfile: str | None = None,
        *,
        seconds: float,
        build_args: Mapping[str, str] = _NOTHING,
        progress: Callable[[str], None] = ignore_progress,
    ) -> str:
        """Build an image unless the engine has it, and return its name.

        Args:
            context: folder with the files that the Dockerfile copies.
            dockerfile: text; None: that of ``Dockerfile`` in `context`.
            seconds: deadline of the build, without the time that it waits for others.
            build_args: values of ``ARG``.
            progress: receives lines of the build's output.

        Raises:
            ConfigError: the build failed; the message has the end of its output.
            SandboxError: the deadline has passed, or the engine cannot be run.
        """
        text = (context / "Dockerfile").read_text(encoding="utf-8") if dockerfile is None else dockerfile
        text = replace_base_images(text, self._base_images) if self._base_images else text
        image = f"{REPOSITORY}:{await asyncio.to_thread(hash_content, text, context, build_args)}"
        async with self._locks[image], self._slots:
            if not await self.has(image):
                await self._build(image, text, context, seconds, build_args, progress)
        return image

    async def has(self, image: str) -> bool:
        """Return whether the engine has an image of this name. Raises SandboxError if it does not answer."""
        # Not `images`: podman fails to list them while another process removes one.
        ask = ["image", "inspect", "--format", "{{.Id}}", image]
        ran = await self.engine.run(ask, seconds=_QUESTION_SECONDS)
        if ran.code == 0:
            return True
        reason = _text(ran.stderr) or f"no answer in {_QUESTION_SECONDS:g} s"
        if not any(words in reason.lower() for words in _ABSENT):
            raise SandboxError(f"{self.engine.command} image inspect failed: {reason}", retryable=True)
        return False

    async def describe(self, image: str) -> ImageSettings:
        """Return user and working directory of an image, which is pulled if the engine does not have it. Raises
        SandboxError."""
        async with self._slots:
            return await self._provider.describe(image)

    async def _build(
        self,
        image: str,
        text: str,
        context: Path,
        seconds: float,
        build_args: Mapping[str, str],
        progress: Callable[[str], None],
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="verl-tool-build-") as folder:
            file = Path(folder) / "Dockerfile"
            file.write_text(text, encoding="utf-8")
            arguments = self._arguments(image, file, context, build_args)
            process = await self.engine.start(*arguments)
            assert process.stdin is not None
            process.stdin.close()
            tail = bytearray()
            try:
                await asyncio.wait_for(_read(process, tail, progress), seconds)
            except asyncio.TimeoutError:
                raise SandboxError(
                    f"the image was not built within {seconds:g} s; raise environment.build_timeout_sec. "
                    f"The end of its output: {_text(tail)}",
                    retryable=False,
                ) from None
            finally:
                await _stop(process)
        if process.returncode != 0:
            hint = "; the build has no network, --build_network host gives it one" if self.network == "none" else ""
            raise ConfigError(f"the image cannot be built (exit code {process.returncode}{hint}): {_text(tail)}")

    def _arguments(self, image: str, file: Path, context: Path, build_args: Mapping[str, str]) -> list[str]:
        proxies = {} if self.network == "none" else _proxies()
        return [
            *("build", "--tag", image, "--file", str(file), "--network", self.network),
            # Otherwise podman ignores SHELL and HEALTHCHECK.
            *(("--format", "docker") if Path(self.engine.command).name == "podman" else ()),
            *(word for name, value in {**proxies, **build_args}.items() for word in ("--build-arg", f"{name}={value}")),
            str(context),
        ]


def hash_content(dockerfile: str, context: Path, build_args: Mapping[str, str]) -> str:
    """Return the SHA-256, as 64 hexadecimal digits, of what an image is built from: the Dockerfile's text, the names,
    permissions and content of the files in `context`, and the build arguments. Dates and owners are left out."""
    digest = hashlib.sha256(json.dumps([dockerfile, sorted(build_args.items())]).encode())
    for path in sorted(context.rglob("*")):
        mode = path.lstat().st_mode
        entry: list[object] = [path.relative_to(context).as_posix(), mode]
        if stat.S_ISLNK(mode):
            entry.append(os.readlink(path))
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                entry.append(hashlib.sha256(file.read()).hexdigest())
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


async def _read(process: asyncio.subprocess.Process, tail: bytearray, progress: Callable[[str], None]) -> None:
    """Read both streams of a build until it has ended. tail: receives the end of what it prints."""

    async def read(stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while data := await stream.read(_READ_BYTES):
            tail.extend(data)
            del tail[:-_TAIL_BYTES]
            if lines := data.decode(errors="replace").strip().splitlines():
                progress(lines[-1])

    await asyncio.gather(read(process.stdout), read(process.stderr), process.wait())


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a build and what it runs.

    podman leaves the processes of a ``RUN`` behind when it is killed. When they are killed first, the build fails and
    removes its container. They are recognized by their PID namespace.
    """
    if process.returncode is None:
        inside = _contained_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for pid in inside:
                os.kill(pid, signal.SIGKILL)
            if not inside:
                os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await end(process)


def _contained_descendants(pid: int) -> list[int]:
    """Return the descendants of a process that are in another PID namespace than this process."""
    found, own = [], os.readlink("/proc/self/ns/pid")
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{child}/ns/pid") != own:
                found.append(child)
    return found


def _proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.lower() in _PROXIES}


def _text(output: bytes | bytearray) -> str:
    return output[-_TAIL_BYTES:].decode(errors="replace").strip()
