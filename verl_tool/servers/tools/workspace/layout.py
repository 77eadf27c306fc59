"""Files that are put into a session from outside."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from verl_tool.content.packed_files import PackedFile
from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox import SandboxPool, Session, SessionLimits
from verl_tool.sandbox.backends import Container, Sandbox

_SECONDS = 60.0


async def started(pool: SandboxPool, limits: SessionLimits | None, files: Mapping[str, PackedFile]) -> Session:
    """A session that has begun with `files` in its folder. Raises what `SandboxPool.session` and `Session.start` do."""
    session = pool.session(limits=limits, files={path: file.content for path, file in files.items()})
    await session.start()
    try:
        await _mark_executable(session, files, ".")
    except BaseException:
        await session.close()
        raise
    return session


async def filled(container: Container, files: Mapping[str, PackedFile]) -> Container:
    """A started container with `files` in its working directory. Raises ConfigError if a file cannot be laid out."""
    try:
        await lay_out(container, files, ".")
        container.pristine = True
    except OSError as error:
        await container.stop()
        raise ConfigError(str(error)) from error
    except BaseException:
        await container.stop()
        raise
    return container


async def lay_out(session: Sandbox, files: Mapping[str, PackedFile], folder: str) -> None:
    """Write `files` below a folder that is there. Raises OSError as `Session.write_file` does, and what `exec` does."""
    for path, file in files.items():
        await session.write_file(f"{folder}/{path}", file.content)
    await _mark_executable(session, files, folder)


async def _mark_executable(session: Sandbox, files: Mapping[str, PackedFile], folder: str) -> None:
    await mark_executable(session, [f"{folder}/{path}" for path, file in files.items() if file.executable])


async def mark_executable(session: Sandbox, paths: Sequence[str]) -> None:
    """Let their owner execute files. Raises SandboxError, and what `exec` does."""
    if not paths:
        return
    if isinstance(session, Container):  # no program of the image, which a trajectory may have changed
        found = [posixpath.join(session.work_directory, path) for path in paths]
        code = f"import os\nfor path in {found!r}:\n    os.chmod(path, os.stat(path).st_mode & 0o7777 | 0o100)\n"
        result = await session.run_apart(code, _SECONDS)
    else:
        result = await session.exec(["chmod", "u+x", "--", *paths])
    if not result.ok:
        words = f"files cannot be made executable: {result.stderr.strip()[:200] or result.limit_hit}"
        raise SandboxError(words, retryable=False)
