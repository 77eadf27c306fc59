"""Runs a verifier on a workspace whose trajectory has ended, and reads the reward that it writes.

The verifier runs in a sandbox of its own (`WorkspaceSandbox.companion`), with a copy of the workspace's files: programs
of the workspace have other processes and other folders, and none of them runs meanwhile but those that the verifier
asks for. So they can neither read what the verifier compares with nor write where its reward is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from verl_tool import sandbox
from verl_tool.content.packed_files import unpack
from verl_tool.errors import SandboxError
from verl_tool.sandbox import RunResult, Session, SessionLimits
from verl_tool.sandbox.backends import Container, Sandbox, WorkspaceSandbox
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.session.command_relay import CALLS, CommandRelay
from verl_tool.servers.tools.workspace.layout import lay_out
from verl_tool.verification import MARGIN_SECONDS, Verdict, Verification, reward_in

TESTS, LOGS, _OWN = "/tests", "/logs/verifier", wire.VERIFIER_DIRECTORY
_HELPER = Path(sandbox.__file__).parent / "inside" / "verifier" / "in_workspace.py"
_COMMAND = f'#!/bin/sh\nexec python3 -I {_OWN}/lib/in_workspace.py "$@"\n'
"""The helper for shells."""
_PREPARE = f"mkdir -p {LOGS} {_OWN}/home/tmp {_OWN}/lib {_OWN}/bin {CALLS} && mkfifo -m 600 {CALLS}/requests || exit 1"
_PREPARE_SESSION = (
    f"mkdir -p /box/tests /box/logs; {_PREPARE}; [ /tests -ef /box/tests ] && [ /logs -ef /box/logs ] || exit 9"
)
"""In a session, the verifier's folders are links."""
_NO_LINKS = 9
"""Exit code of `_PREPARE_SESSION`."""
_FOLDERS = (TESTS, "/logs", _OWN)
"""The verifier's."""
_CLEAN = """
import os, stat
def within(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
folders = list(OWN)
while folders:
    try:
        entries = list(os.scandir(folders.pop()))
    except OSError:
        continue  # a path that is too long to be opened
    for entry in entries:
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            folders.append(entry.path)
        elif stat.S_ISLNK(mode):
            try:
                target = os.path.realpath(entry.path)
            except OSError:
                target = "/proc"
            if within(target, OUTSIDE) and not within(target, OWN):
                os.unlink(entry.path)
        elif not stat.S_ISREG(mode):
            os.unlink(entry.path)
"""
"""Removes from the copied files what is neither file, folder nor link, and links that lead to the verifier's own files
or to its processes: a link ``answer.txt`` to the file with the expected answer would be right."""
ENVIRONMENT = MappingProxyType(
    {
        "HOME": f"{_OWN}/home",
        "TMPDIR": f"{_OWN}/home/tmp",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": f"{_OWN}/lib:{TESTS}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.hooksPath",
        "GIT_CONFIG_VALUE_0": "/dev/null",
        "GIT_CONFIG_KEY_1": "core.fsmonitor",
        "GIT_CONFIG_VALUE_1": "false",
    }
)
"""Nothing of it leads to a file of the trajectory's, which programs would read by themselves."""
WORKSPACE_VARIABLE = "VERL_TOOL_WORKSPACE"
"""``container`` where the copy of the workspace has the paths and programs of the workspace itself."""
_START = f'PATH="{_OWN}/bin:$PATH" exec bash --noprofile --norc {TESTS}/test.sh'
_EXTRA_BYTES, _EXTRA_FILES, _MIN_PROCESSES = 64 << 20, 4096, 64
"""Limits of a verifier beyond those of the workspace, whose files it has as well."""
_MAX_MESSAGE_CHARACTERS = 2000
"""Of the end of what a verifier printed."""


async def verify(session: WorkspaceSandbox, verification: Verification) -> Verdict:
    """End what runs in a workspace, and run the verifier beside it. What the trajectory has done to its
    workspace (folders that were moved, say) gives the reward 0, as does a verifier that does not end, fails (its exit
    code is not 0) or writes no reward. Raises ToolFault if the session is lost, SandboxError if the sandbox failed."""
    began = time.monotonic()
    await session.end_programs()
    reward, reason, numbers = await _verify(session, verification)
    return Verdict(reward, reason, numbers, seconds=time.monotonic() - began)


async def _verify(session: WorkspaceSandbox, verification: Verification) -> tuple[float, str, dict[str, float]]:
    if not session.whole():
        return 0.0, "the trajectory moved the folders of its workspace", {}
    async with session.companion(_limits(session.limits, verification), _FOLDERS) as own:
        await _prepare(own, verification)
        complaint = await session.copy_files(own, MARGIN_SECONDS / 2) or await _remove_traps(own)
        if complaint:
            return 0.0, f"the workspace's files cannot be copied: {complaint[-_MAX_MESSAGE_CHARACTERS:]}", {}
        relay = CommandRelay(own.request_folder(CALLS), session, verification.timeout_seconds)
        async with relay.serving():
            result = await own.exec(
                ["bash", "--noprofile", "--norc", "-c", _START],
                wall_seconds=verification.timeout_seconds,
                env={**ENVIRONMENT, **await _environment(own), **verification.env},
            )
        if relay.fault is not None:
            raise relay.fault
        reward, why, numbers = await read_reward(own, result, verification)
    return reward, "\n".join(part for part in (why, result.output[-_MAX_MESSAGE_CHARACTERS:].strip()) if part), numbers


def _limits(limits: SessionLimits, verification: Verification) -> SessionLimits:
    return replace(
        limits,
        disk_bytes=limits.disk_bytes + _EXTRA_BYTES,
        disk_files=limits.disk_files + _EXTRA_FILES,
        processes=max(limits.processes, _MIN_PROCESSES),
        total_wall_seconds=verification.timeout_seconds + 2 * MARGIN_SECONDS,
    )


async def _prepare(own: WorkspaceSandbox, verification: Verification) -> None:
    """Lay out what the verifier needs. Raises SandboxError: nothing of the trajectory's is there yet."""
    script = _PREPARE_SESSION if isinstance(own, Session) else _PREPARE
    result = await own.exec(script, wall_seconds=MARGIN_SECONDS / 2, cwd="/")
    if result.exit_code == _NO_LINKS:
        raise SandboxError(
            "the sandbox has no /tests and /logs: this host's Python is there; install it elsewhere", False
        )
    if result.exit_code != 0:
        why = result.stderr[-_MAX_MESSAGE_CHARACTERS:].strip() or result.limit_hit
        raise SandboxError(f"the verifier's folders cannot be made: {why}", retryable=False)
    try:
        await lay_out(own, unpack(verification.files), TESTS)
        await own.write_file(f"{_OWN}/lib/in_workspace.py", _helper())
        await own.write_file(f"{_OWN}/bin/in_workspace", _COMMAND.encode())
        await own.exec(["chmod", "+x", f"{_OWN}/bin/in_workspace"])
    except OSError as error:
        raise SandboxError(f"the verifier's files cannot be written: {error.strerror}", retryable=False) from error


def clean_links(folders: Sequence[str], outside: Sequence[str]) -> str:
    """Return a Python program that removes from `folders` what is neither file, folder nor link, and links that lead
    `outside`."""
    return f"OWN, OUTSIDE = {tuple(folders)!r}, {tuple(outside)!r}{_CLEAN}"


@lru_cache(maxsize=1)
def _helper() -> bytes:
    return _HELPER.read_bytes()


async def _environment(own: WorkspaceSandbox) -> dict[str, str]:
    """What a verifier in a container has besides."""
    if not isinstance(own, Container):
        return {}
    return {WORKSPACE_VARIABLE: "container", **await own.trusted_paths()}


async def _remove_traps(own: WorkspaceSandbox) -> str:
    """Why not, if something among the workspace's files is in the way."""
    seconds = MARGIN_SECONDS / 2
    if isinstance(own, Container):
        folders = (own.work_directory, wire.WORK_DIRECTORY, "/tmp")
        result = await own.run_apart(clean_links(folders, (*_FOLDERS, "/proc", "/dev", "/sys")), seconds)
    else:
        code = clean_links(("/box/work", "/box/tmp"), ("/box", "/proc", "/dev", "/sys"))
        result = await own.run(code, wall_seconds=seconds)
    return "" if result.ok else result.stderr.strip() or f"their check was ended by {result.limit_hit}"


async def read_reward(
    own: Sandbox, result: RunResult, verification: Verification
) -> tuple[float, str, dict[str, float]]:
    """Return the reward, why it is 0 if the verifier did not say so, and what else the verifier measured. own: where it
    ran. result: of its program."""
    if result.limit_hit == "wall_seconds":
        return 0.0, f"the verifier did not end within {verification.timeout_seconds:g} s", {}
    if result.exit_code is None:
        return 0.0, f"the verifier was ended by {result.limit_hit or f'signal {result.signal}'}", {}
    if result.exit_code != 0:
        return 0.0, f"the verifier failed: its exit code is {result.exit_code}", {}
    try:
        reward, numbers = reward_in(await _file(own, "reward.json"), await _file(own, "reward.txt"))
    except ValueError as error:
        return 0.0, str(error), {}
    return reward, "", numbers


async def _file(own: Sandbox, name: str) -> bytes | None:
    """What the verifier wrote; None if it is not there. Raises ValueError if it is no plain file."""
    try:
        return await own.read_file(f"{LOGS}/{name}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
