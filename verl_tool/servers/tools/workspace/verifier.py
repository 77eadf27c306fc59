"""Runs a verifier on a workspace whose trajectory has ended, and reads the reward that it writes.

The verifier runs in a sandbox of its own (`WorkspaceSandbox.companion`), with a copy of the workspace's files: programs
of the workspace have other processes and other folders, and none of them runs meanwhile but those that the verifier
asks for. So they can neither read what the verifier compares with nor write where its reward is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl_tool import sandbox
from verl_tool.content.packed_files import unpack
from verl_tool.errors import LateError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import RunResult, SessionLimits
from verl_tool.sandbox.backends import Container, Sandbox, WorkspaceSandbox
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.result import CellResult
from verl_tool.sandbox.session.command_relay import CALLS, CommandRelay
from verl_tool.servers.tools.workspace.layout import lay_out, mark_executable
from verl_tool.util.deadline import Deadline
from verl_tool.util.slots import pause_in_queue
from verl_tool.verification import MARGIN_SECONDS, Verdict, Verification, reward_in

TESTS, LOGS, _OWN = "/tests", "/logs/verifier", wire.VERIFIER_DIRECTORY
_INSIDE = Path(sandbox.__file__).parent / "inside" / "verifier"
_COMMAND = f'#!/bin/sh\nexec python3 -I {_OWN}/lib/in_workspace.py "$@"\n'
"""The helper for shells."""
_MADE = (LOGS, "/logs/agent", "/logs/artifacts", f"{_OWN}/home/tmp", f"{_OWN}/lib", f"{_OWN}/bin", CALLS)
_NOT_EMPTY, _NO_LINKS = 8, 9
"""Exit codes of `_PREPARE` and `_PREPARE_SESSION`."""
_PREPARE = f"""
import os
for folder in ("{TESTS}", "/logs", "{_OWN}"):
    if os.path.isdir(folder) and os.listdir(folder):
        print(folder, os.listdir(folder), flush=True)
        os._exit({_NOT_EMPTY})
for folder in {_MADE!r}:
    os.makedirs(folder, exist_ok=True)
os.mkfifo("{CALLS}/requests", 0o600)
"""
_PREPARE_SESSION = (
    f"mkdir -p /box/tests /box/logs {' '.join(_MADE)} && mkfifo -m 600 {CALLS}/requests || exit 1; "
    "[ /tests -ef /box/tests ] && [ /logs -ef /box/logs ] || exit 9"
)
"""In a session, the verifier's folders are links."""
ROOT = "0:0"
"""Not by name: the image's /etc/passwd may have been changed."""
_FOLDERS = (TESTS, "/logs", _OWN)
"""The verifier's."""
SHARED_FOLDERS = (TESTS, "/logs")
"""Those in memory of a container in which a verifier runs beside its trajectory (`verify_in_place`)."""
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
_START_TRUSTED = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{_OWN}/lib" {_START}'
"""With the image's own environment, such as its HOME, of which the trajectory may have changed all."""
_EXTRA_BYTES, _EXTRA_FILES, _MIN_PROCESSES = 64 << 20, 4096, 64
"""Limits of a verifier beyond those of the workspace, whose files it has as well."""
LARGE_BYTES, LARGE_FILES = 256 << 20, 50_000
_LARGE_SESSION_BYTES, _LARGE_SESSION_FILES = 1 << 30, 200_000
"""Of a session, whose limits count: what is in it is not known."""
_LARGE_SECONDS = MARGIN_SECONDS - 10
"""In which a larger workspace must be judged, in addition to the verifier's own time: before the callers' deadline."""
_CLOSED_SECONDS = 20.0
"""To remove links to what the trajectory cannot read. It is to blame if that takes longer."""
_MAX_MESSAGE_CHARACTERS = 2000
"""Of the end of what a verifier printed."""


async def verify(session: WorkspaceSandbox, verification: Verification) -> Verdict:
    """End what runs in a workspace, and run the verifier beside it. What the trajectory has done to its
    workspace (folders that were moved, say) gives the reward 0, as does a verifier that does not end, fails (its exit
    code is not 0) or writes no reward. Raises ToolFault if the session is lost, SandboxError if the sandbox failed or
    is late. A workspace above `LARGE_BYTES` or `LARGE_FILES` can be why it is late, and then gives the reward 0."""
    began = time.monotonic()
    await session.end_programs()
    if await _is_large(session):
        left = verification.timeout_seconds + _LARGE_SECONDS - (time.monotonic() - began)
        try:
            deadline = Deadline(max(0.0, left))
            with deadline, pause_in_queue(deadline):
                reward, reason, numbers = await _verify(session, verification)
        except (asyncio.TimeoutError, LateError):
            words = f"the workspace is large and was not judged in {verification.timeout_seconds + _LARGE_SECONDS:g} s"
            reward, reason, numbers = 0.0, words, {}
    else:
        reward, reason, numbers = await _verify(session, verification)
    return Verdict(reward, reason, numbers, seconds=time.monotonic() - began)


async def verify_in_place(container: Container, verification: Verification) -> Verdict:
    """Run the verifier in the trajectory's own container, beside what runs there, as Harbor's shared verifier. Programs
    of the trajectory can read its files and write its reward. The container has the folders of `SHARED_FOLDERS`. Raises
    ToolFault if the container is lost, or the verifier needs another user or other hosts; SandboxError."""
    began = time.monotonic()
    hosts = verification.allowed_hosts
    if verification.user and container.require().user[0] != 0:
        problem = f"the row's verifier is {verification.user}, and programs of the container are not"
    elif hosts is not None and set(hosts) != set(container.allowed_hosts):
        problem = (
            f"the row's verifier reaches {list(hosts)!r:.200}, and its container {list(container.allowed_hosts)!r:.200}"
        )
    else:
        problem = ""
    if problem:
        raise ToolFault(FaultKind.MISCONFIGURED, f"{problem}; leave out shared_verifier", retryable=False)
    container.extend_wall(verification.max_seconds)
    folders = f"{LOGS} /logs/agent /logs/artifacts {TESTS}"
    made = await container.exec(f"rm -rf {LOGS} {TESTS}/*; mkdir -p {folders}", cwd="/", wall_seconds=MARGIN_SECONDS)
    if not made.ok:
        return Verdict(0.0, f"the verifier's folders cannot be made: {made.output[-_MAX_MESSAGE_CHARACTERS:]}")
    try:
        await lay_out(container, await asyncio.to_thread(unpack, verification.files), TESTS)
    except (OSError, SandboxError) as error:  # programs that go on may be in the way
        return Verdict(0.0, f"the verifier's files cannot be written: {error}")
    result = await container.exec(
        ["bash", f"{TESTS}/test.sh"], wall_seconds=verification.timeout_seconds, env=verification.env
    )
    reward, why, numbers = await read_reward(container, result, verification)
    message = "\n".join(part for part in (why, result.output[-_MAX_MESSAGE_CHARACTERS:].strip()) if part)
    return Verdict(reward, message, numbers, seconds=time.monotonic() - began)


async def _is_large(session: WorkspaceSandbox) -> bool:
    if not isinstance(session, Container):
        limits = session.limits
        return limits.disk_bytes > _LARGE_SESSION_BYTES or limits.disk_files > _LARGE_SESSION_FILES
    arguments = (session.changed_folders(), LARGE_BYTES, LARGE_FILES, session.started_at)
    check = f"print(is_large{arguments!r}, flush=True)"
    return (await session.run_apart(f"{_checks()}\n{check}\n", MARGIN_SECONDS)).stdout.strip() != "False"


async def _verify(session: WorkspaceSandbox, verification: Verification) -> tuple[float, str, dict[str, float]]:
    if not session.whole():
        return 0.0, "the trajectory moved the folders of its workspace", {}
    seconds = verification.copy_seconds
    settings = _companion_settings(session, verification)
    if verification.user and (complaint := await _remove_closed_links(session, seconds)):
        return 0.0, complaint, {}
    own: WorkspaceSandbox
    async with session.companion(**settings) as own:
        variables = await _container_variables(own)
        complaint = await _prepare(own, verification)
        complaint = complaint or await session.copy_files(own, seconds) or await _remove_traps(own, seconds)
        if complaint:
            return 0.0, f"the workspace's files cannot be copied: {complaint[-_MAX_MESSAGE_CHARACTERS:]}", {}
        relay = CommandRelay(own.request_folder(CALLS), session, verification.timeout_seconds)
        async with relay.serving():
            is_trusted = isinstance(own, Container) and own.trusts_image
            result = await own.exec(
                ["bash", "--noprofile", "--norc", "-c", _START_TRUSTED if is_trusted else _START],
                wall_seconds=verification.timeout_seconds,
                env={**({} if is_trusted else ENVIRONMENT), **variables, **verification.env},
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
        total_wall_seconds=verification.max_seconds,
    )


async def _prepare(own: WorkspaceSandbox, verification: Verification) -> str:
    """Lay out what the verifier needs. Return why not, if its folders have files of an image that the trajectory has
    changed. Raises SandboxError and ToolFault: nothing else of the trajectory's is there yet."""
    result = await _make_folders(own)
    if result.exit_code == _NO_LINKS:
        raise SandboxError(
            "the sandbox has no /tests and /logs: this host's Python is there; install it elsewhere", False
        )
    if result.exit_code == _NOT_EMPTY:
        complaint = f"the image has files in the verifier's folders: {result.stdout.strip()[:_MAX_MESSAGE_CHARACTERS]}"
        if not isinstance(own, Container) or own.changed_by is None:
            raise ToolFault(FaultKind.MISCONFIGURED, complaint, retryable=False)
        return complaint
    if result.exit_code != 0:
        why = result.stderr[-_MAX_MESSAGE_CHARACTERS:].strip() or result.limit_hit
        raise SandboxError(f"the verifier's folders cannot be made: {why}", retryable=False)
    try:
        await lay_out(own, unpack(verification.files), TESTS)
        await own.write_file(f"{_OWN}/lib/in_workspace.py", _helper())
        await own.write_file(f"{_OWN}/bin/in_workspace", _COMMAND.encode())
        await mark_executable(own, [f"{_OWN}/bin/in_workspace"])
    except OSError as error:
        raise SandboxError(f"the verifier's files cannot be written: {error.strerror}", retryable=False) from error
    return ""


async def _make_folders(own: WorkspaceSandbox) -> RunResult:
    if isinstance(own, Container):  # no program of the image, which the trajectory may have changed
        return await own.run_apart(_PREPARE, MARGIN_SECONDS)
    return await own.exec(_PREPARE_SESSION, wall_seconds=MARGIN_SECONDS, cwd="/")


def clean_links(folders: Sequence[str], outside: Sequence[str], owner: int | None = None) -> str:
    """Return a Python program that removes from `folders` what is neither file, folder nor link, and links that lead
    `outside`: a link ``answer.txt`` to the file with the expected answer would be right. owner: a user, of whom such
    links are removed from the rest of the root file system too."""
    return f"{_checks()}\nclean({tuple(folders)!r}, {tuple(outside)!r}, {owner!r})\n"


@lru_cache(maxsize=1)
def _checks() -> str:
    return (_INSIDE / "copied_files.py").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _helper() -> bytes:
    return (_INSIDE / "in_workspace.py").read_bytes()


def _companion_settings(session: WorkspaceSandbox, verification: Verification) -> dict[str, Any]:
    """Return the arguments of `companion`. Raises ToolFault for a user that the verifier cannot be, and hosts that it
    cannot reach."""
    settings: dict[str, Any] = {"limits": _limits(session.limits, verification), "folders": _FOLDERS}
    if verification.user:
        if not isinstance(session, Container) or not session.is_writable:
            message = f"the row's verifier is {verification.user}, which needs a container with writable=true"
            raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)
        settings["user"] = ROOT
    if isinstance(session, Container):
        settings["allowed_hosts"] = verification.allowed_hosts
    elif verification.allowed_hosts:
        message = "the row's verifier has allowed_hosts, and the sandbox has no network; serve the tools with backend"
        raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)
    return settings


async def _remove_closed_links(session: WorkspaceSandbox, seconds: float) -> str:
    """Return why not, if links to what the trajectory cannot read cannot be removed. Raises SandboxError if it is
    late."""
    assert isinstance(session, Container)
    code = f"{_checks()}\nremove_closed_links({session.changed_folders()[:-1]!r}, {_CLOSED_SECONDS})\n"
    return _why_not(await session.run_apart(code, seconds), seconds)


async def _container_variables(own: WorkspaceSandbox) -> dict[str, str]:
    """Return what a verifier in a container has besides. Nothing of the trajectory's is in its folders yet."""
    if not isinstance(own, Container):
        return {}
    return {WORKSPACE_VARIABLE: "container", **await own.trusted_variables()}


async def _remove_traps(own: WorkspaceSandbox, seconds: float) -> str:
    """Return why not, if something among the workspace's files is in the way. Raises SandboxError if it is late."""
    result: RunResult | CellResult
    if isinstance(own, Container):
        folders = (own.work_directory, wire.WORK_DIRECTORY, "/tmp")
        outside = (*_FOLDERS, "/proc", "/dev", "/sys")
        owner = None if own.changed_by is None else own.changed_by[0]
        result = await own.run_apart(clean_links(folders, outside, owner), seconds)
    else:
        code = clean_links(("/box/work", "/box/tmp"), ("/box", "/proc", "/dev", "/sys"))
        result = await own.run(code, wall_seconds=seconds)
    return _why_not(result, seconds)


def _why_not(result: RunResult | CellResult, seconds: float) -> str:
    """Return why a check of files failed; empty if it did not. Raises LateError."""
    if result.limit_hit in ("wall_seconds", "total_wall_seconds"):
        raise LateError(f"the workspace's files were not checked within {seconds:g} s", retryable=False)
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
