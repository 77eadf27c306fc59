"""Runs a row's verifier on the files that an agent program left in its working directory.

The verifier gets a copy of them in a fresh sandbox, or in a fresh container of the image. The program's own sandbox has
ended by then, and its processes with it: they can forge the copy, as they can change the files, and nothing else.
"""

from __future__ import annotations

import asyncio
import tempfile
import time

from verl_tool.content.packed_files import unpack
from verl_tool.errors import SandboxError, ToolFault
from verl_tool.gateway.program.container_program import ProgramContainers, check_workdir
from verl_tool.protocol import Fault, FaultKind
from verl_tool.sandbox import Level, Policy, RunResult, SandboxPool, SessionLimits
from verl_tool.sandbox.backends import Container
from verl_tool.sandbox.limits import Limits
from verl_tool.servers.tools.workspace.layout import lay_out
from verl_tool.servers.tools.workspace.pools import PoolSettings, give_pool, take_pool
from verl_tool.servers.tools.workspace.verifier import ENVIRONMENT, LOGS, TESTS, clean_links, read_reward, verify
from verl_tool.verification import Verdict, Verification

COPY_SECONDS = 60.0
"""To receive the copy from the program's sandbox, whose processes can delay it."""
_LARGE_COPY_BYTES = 64 << 20
"""A tar up to this size is not why it is late to be unpacked or checked. It has at most 131,072 files."""
_VERIFIERS = 8
"""Of a worker process, that run at a time."""
_LENGTH_BYTES = 4
_MAX_PART_BYTES = 1 << 21
_MAX_MESSAGE_CHARACTERS = 2000
_NO_PROGRAM = (126, 127)
_UNPACK = "tar -xpf - --no-same-owner --delay-directory-restore"
_REPLACE = f'mkdir -p -- "$1" && cd -- "$1" && find . -mindepth 1 -delete || exit 9; exec {_UNPACK}'
"""In a container, whose image may have files there that the program removed."""
_NOT_EMPTIED = 9
"""Exit code of `_REPLACE`."""
_LOGS_ROOT = "/logs"
_HOME = f"{_LOGS_ROOT}/home"
_MAKE_FOLDERS = f"import os\nfor folder in {(LOGS, _HOME)!r}: os.makedirs(folder, exist_ok=True)\n"
_OUTSIDE = (TESTS, _LOGS_ROOT, "/proc", "/dev", "/sys")
_ENVIRONMENT = {**ENVIRONMENT, "HOME": _HOME, "TMPDIR": "/tmp", "PYTHONPATH": TESTS}


class WorkspaceCopy:
    """The files of a working directory as a tar, in a temporary file. Nothing here reads what is in it."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of the tar."""
        self._max_bytes = max_bytes
        self.problem = "the program ended before its files were copied"
        """Why the copy is not complete; empty if it is."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `__exit__`)

    def __enter__(self) -> WorkspaceCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    async def receive(self, stream: asyncio.StreamReader) -> None:
        """Store what the forwarder sends: parts with their length before them, and an empty part at the end."""
        try:
            self.problem = await asyncio.wait_for(self._receive(stream), COPY_SECONDS)
        except asyncio.TimeoutError:
            self.problem = f"they were not copied within {COPY_SECONDS:g} s"
        except asyncio.IncompleteReadError:
            self.problem = "the program ended before its files were copied"

    async def _receive(self, stream: asyncio.StreamReader) -> str:
        size = 0
        while length := int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big"):
            size += length
            if size > self._max_bytes or length > _MAX_PART_BYTES:
                return f"they are more than {self._max_bytes} bytes as a tar; raise gateway.program.max_copy_bytes"
            self._file.write(await stream.readexactly(length))
        return ""

    def read(self) -> bytes:
        """Return the tar."""
        self._file.seek(0)
        return self._file.read()


class WorkspaceVerifier:
    """Runs the verifiers of a process's programs. `close` it."""

    def __init__(self, limits: Limits) -> None:
        """limits: of a program, which its verifier has too."""
        self._limits = SessionLimits(
            memory_bytes=limits.memory_bytes,
            processes=limits.processes,
            open_files=limits.open_files,
            disk_bytes=limits.disk_bytes,
            disk_files=limits.disk_files,
        )
        self._settings = PoolSettings(1, (), _VERIFIERS, Policy(), Level.full, self._limits)
        self._pool: SandboxPool | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(_VERIFIERS)

    async def verify(
        self, copy: WorkspaceCopy, verification: Verification, containers: ProgramContainers | None
    ) -> Verdict:
        """Return what the verifier says of the copy. containers: of the program; None: it ran in the sandbox.

        A copy that is missing or cannot be unpacked gives the reward 0, and infrastructure that fails is the verdict's
        fault. Raises ConfigError for a container that no verifier can run in.
        """
        if copy.problem:
            return _no_files(copy.problem)
        async with self._slots:
            content = await asyncio.to_thread(copy.read)
            try:
                if containers is None:
                    return await self._verify_in_sandbox(content, verification)
                return await self._verify_in_container(content, verification, containers)
            except ToolFault as error:
                return Verdict(fault=error.as_fault())
            except SandboxError as error:
                return Verdict(fault=Fault(kind=FaultKind.SANDBOX, message=str(error), retryable=False))

    async def close(self) -> None:
        """End the sandbox."""
        if self._pool is not None:
            self._pool = None
            await give_pool(self._settings)

    async def _verify_in_sandbox(self, content: bytes, verification: Verification) -> Verdict:
        async with self._starting:
            if self._pool is None:
                self._pool = await take_pool(self._settings)
        async with self._pool.session(limits=self._limits) as session:
            unpacked = await session.exec(_UNPACK, stdin=content, wall_seconds=verification.copy_seconds)
            _reject_late(unpacked, content)
            if unpacked.exit_code in _NO_PROGRAM:
                raise SandboxError(f"files cannot be unpacked: {unpacked.stderr.strip()}", retryable=False)
            if not unpacked.ok:
                return _no_files(unpacked.stderr.strip() or f"tar was ended by {unpacked.limit_hit}")
            return await verify(session, verification)

    async def _verify_in_container(
        self, content: bytes, verification: Verification, containers: ProgramContainers
    ) -> Verdict:
        started = time.monotonic()
        options = containers.options
        workdir = await containers.find_workdir()
        check_workdir(workdir, options.writable)
        async with containers.container(
            workdir=workdir, folders=(TESTS, _LOGS_ROOT), allowed_hosts=verification.allowed_hosts
        ) as container:
            fill = ["bash", "-c", _REPLACE, "bash", workdir]
            variables = await container.trusted_variables((workdir,))
            unpacked = await container.exec(
                fill, stdin=content, wall_seconds=verification.copy_seconds, env=variables, cwd="/"
            )
            _reject_late(unpacked, content)
            if unpacked.exit_code == _NOT_EMPTIED:  # the folder is the image's, and nothing of the program is there
                words = f"{workdir} of {containers.image} cannot be emptied: {unpacked.stderr.strip()}"
                raise SandboxError(words[:_MAX_MESSAGE_CHARACTERS], retryable=False)
            if unpacked.exit_code in _NO_PROGRAM:
                words = f"the image {containers.image} needs tar and find for a verifier: {unpacked.stderr.strip()}"
                raise SandboxError(words[:_MAX_MESSAGE_CHARACTERS], retryable=False)
            if not unpacked.ok:
                return _no_files(unpacked.stderr.strip() or f"tar was ended by {unpacked.limit_hit}")
            cleaned = await container.run_apart(clean_links((workdir,), _OUTSIDE), verification.copy_seconds)
            _reject_late(cleaned, content)
            if not cleaned.ok:
                return _no_files(cleaned.stderr.strip() or f"their check was ended by {cleaned.limit_hit}")
            if verification.user:  # the files are the program's: as its user, before root sees them
                try:
                    return await verify(container, verification)
                except ToolFault as fault:
                    if fault.kind is FaultKind.MISCONFIGURED:
                        raise
                    return Verdict(0.0, f"the verifier's container ended: {fault.message}")
            await _lay_out(container, verification)
            try:
                result = await container.exec(
                    ["bash", f"{TESTS}/test.sh"],
                    wall_seconds=verification.timeout_seconds,
                    env={**_ENVIRONMENT, **variables, **verification.env},
                    cwd=workdir,
                )
                reward, why, numbers = await read_reward(container, result, verification)
            except ToolFault as fault:  # the code that it checks can bring the kernel to end it for its memory
                return Verdict(0.0, f"the verifier's container ended: {fault.message}")
        message = "\n".join(part for part in (why, result.output[-_MAX_MESSAGE_CHARACTERS:].strip()) if part)
        return Verdict(reward, message, numbers, seconds=time.monotonic() - started)


async def _lay_out(container: Container, verification: Verification) -> None:
    """Write the verifier's files. Raises SandboxError."""
    made = await container.run_apart(_MAKE_FOLDERS, COPY_SECONDS)
    if not made.ok:
        raise SandboxError(f"the verifier's folders cannot be made: {made.stderr.strip()[:200]}", retryable=False)
    try:
        await lay_out(container, unpack(verification.files), TESTS)
    except OSError as error:
        words = f"the verifier's files cannot be written to {TESTS}: {error.strerror}"
        raise SandboxError(words, retryable=False) from error


def _reject_late(result: RunResult, content: bytes) -> None:
    """Raise SandboxError if the copy took too long and is not large."""
    if result.limit_hit in ("wall_seconds", "total_wall_seconds") and len(content) <= _LARGE_COPY_BYTES:
        raise SandboxError("the program's files were not unpacked and checked in time", retryable=False)


def _no_files(why: str) -> Verdict:
    return Verdict(0.0, f"the files of the program cannot be checked: {why[-_MAX_MESSAGE_CHARACTERS:]}")
