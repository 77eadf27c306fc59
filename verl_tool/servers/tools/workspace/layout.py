"""Files that are put into a session from outside."""

from __future__ import annotations

from collections.abc import Mapping

from verl_tool.content.packed_files import PackedFile
from verl_tool.errors import ConfigError
from verl_tool.sandbox import SandboxPool, Session, SessionLimits
from verl_tool.sandbox.backends import Container, Sandbox


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
    programs = [f"{folder}/{path}" for path, file in files.items() if file.executable]
    if programs:
        await session.exec(["chmod", "u+x", "--", *programs])
