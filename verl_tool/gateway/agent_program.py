"""A program that acts as the agent of a session: in the sandbox, where it reaches the gateway and nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.gateway.container_program import ContainerOptions, ContainerService, ProgramContainers
from verl_tool.gateway.gateway_app import SESSIONS_PATH
from verl_tool.gateway.presets import MCP_PRESETS, PRESETS
from verl_tool.sandbox.limits import Limits
from verl_tool.sandbox.sandboxed_service import RunningService, SandboxedService, ServiceSandbox

PORT = 8000
"""Of the gateway, on the loopback device of each program's sandbox."""
ROW_IMAGE = "workspace_image"
"""In ``tools_kwargs`` of a row: its own image."""
MAX_OUTPUT = 64 << 10
"""Bytes of a program's output that are kept: the last ones."""
MAX_FILE = 256 << 10
"""Bytes of a file that is kept."""
MCP_VARIABLE = "MCP_URL"
_FORWARDER = (Path(__file__).parent / "inside" / "forwarder.py").read_text(encoding="utf-8")
_LINE_BYTES = 64 << 20
_OPEN_FILES, _DISK_BYTES, _DISK_FILES = 4096, 1 << 30, 1 << 16
_PLACEHOLDER = re.compile(r"\{(?:task|base_url|key|session|mcp_url)\}")
_MAX_ARGUMENT = 2000
"""Characters of an argument that a record has."""
_NOT_STARTED = (126, 127)
"""Status of a program that cannot be started in the sandbox, or in a container."""


class AgentProgram(BaseModel):
    """How the program is started. In `command` and `env`, ``{task}``, ``{base_url}``, ``{key}``, ``{session}`` and
    ``{mcp_url}`` are replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    """The program and its arguments. A program without a folder is looked for next to the Python in use, then on
    PATH."""
    preset: str | None = None
    """In place of `command`: an agent of `PRESETS`, such as ``claude_code``."""
    install: str = ".agents"
    """The folder that `scripts/install_agents.sh` installed the preset's agent into."""
    env: dict[str, str] = Field(default_factory=dict)
    """In addition to ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``."""
    seconds: float = Field(default=600.0, gt=0)
    """After this long the program is killed."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that it may read, at the same paths."""
    memory_bytes: int = Field(default=4 << 30, ge=64 << 20)
    """Of all its processes together."""
    processes: int = Field(default=256, ge=1)
    """Processes and threads at once."""
    image: str | None = None
    """It runs in a container of this image, which needs ``bash`` and ``python3``, and not in the sandbox."""
    container: ContainerOptions = ContainerOptions()
    mcp: bool = False
    """It calls the tools of the trainer's tool server over MCP, at ``{mcp_url}`` (``MCP_URL`` in its environment)."""
    keep_files: tuple[str, ...] = ()
    """Files in its working directory whose contents are kept in the record, such as an answer to grade."""

    @property
    def limits(self) -> Limits:
        """What its sandbox allows."""
        return Limits(
            memory_bytes=self.memory_bytes,
            processes=self.processes,
            open_files=_OPEN_FILES,
            disk_bytes=_DISK_BYTES,
            disk_files=_DISK_FILES,
        )

    def choose_place(self, sandbox: ServiceSandbox, row_image: str | None = None) -> ServiceSandbox | ProgramContainers:
        """Where it runs: in `sandbox`, or in containers. row_image: a row's own, in place of `image`.

        Raises ConfigError if the program has none.
        """
        if self.image is None and row_image is None:
            return sandbox
        if self.image is None:
            raise ConfigError(f"tools_kwargs.{ROW_IMAGE}={row_image!r:.100} needs gateway.program.image, the default")
        return ProgramContainers(row_image or self.image, self.container, self.limits)

    def resolve(self) -> AgentProgram:
        """The program with its preset filled in. Raises ConfigError if it names none, or one that is not installed."""
        if self.preset is None:
            if not self.command:
                raise ConfigError("gateway.program has neither command nor preset; set one")
            return self
        if self.preset not in PRESETS or self.command:
            known = ", ".join(PRESETS)
            why = "is set, and command too; set one of them" if self.command else f"is unknown; known: {known}"
            raise ConfigError(f"gateway.program.preset={self.preset} {why}")
        install = Path(self.install).absolute()
        if not install.is_dir():
            hint = f"run bash scripts/install_agents.sh {self.install}"
            raise ConfigError(f"gateway.program.install={self.install} is not a folder; {hint}")
        if self.mcp and self.preset not in MCP_PRESETS:
            able = ", ".join(sorted(MCP_PRESETS))
            raise ConfigError(f"gateway.program.mcp: {self.preset} does not speak MCP; those that do: {able}")
        preset = PRESETS[self.preset](install)
        update = {
            "command": preset.command,
            "env": preset.env | self.env,
            "readable": (*preset.readable, *self.readable),
            "preset": None,
        }
        return self.model_copy(update=update)

    def describe(self) -> dict[str, Any]:
        """The settings, for a record. Of its environment only the names, since values may be secret."""
        described = self.model_dump(mode="json", exclude={"preset", "install"})
        command = [text[:_MAX_ARGUMENT] for text in self.command]
        return {**described, "command": command, "env": sorted(self.env)}


class SessionAddress(Protocol):
    """Where a program finds its session."""

    @property
    def id(self) -> str:
        """In the paths of its routes."""

    @property
    def key(self) -> str:
        """The program's API key."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended."""

    exit_code: int | None
    """None: it was killed at the time limit."""
    output: str
    """The end of what it printed."""
    files: dict[str, str] = field(default_factory=dict)
    """Contents of `AgentProgram.keep_files` that exist."""
    seconds: float = 0.0


async def run_program(
    sandbox: ServiceSandbox | ProgramContainers,
    program: AgentProgram,
    session: SessionAddress,
    socket: Path,
    task: str,
    files: Mapping[str, bytes] | None = None,
) -> ProgramResult:
    """Run `program` in a fresh sandbox or container until it exits. socket: Unix socket on which the gateway listens.
    files: put into its working directory first.

    Raises SandboxError if it cannot be started.
    """
    base = f"http://127.0.0.1:{PORT}{SESSIONS_PATH}/{session.id}"
    values = {"{task}": task, "{base_url}": f"{base}/v1", "{key}": session.key, "{session}": session.id}
    values["{mcp_url}"] = f"{base}/mcp"
    env = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.key,
        **({MCP_VARIABLE: f"{base}/mcp"} if program.mcp else {}),
        **{name: _fill(text, values) for name, text in program.env.items()},
    }
    service = SandboxedService(
        (
            *("python3", "-c", _FORWARDER, str(socket), str(PORT), json.dumps(program.keep_files)),
            *(_fill(text, values) for text in program.command),
        ),
        env,
        readable=(str(socket.parent), *program.readable),
        loopback=True,
    )
    started = time.monotonic()
    running: RunningService | ContainerService = await sandbox.spawn(service, line_bytes=_LINE_BYTES)
    log = bytearray()
    last: dict[str, Any] | None = None
    try:
        last = await asyncio.wait_for(_communicate(running.process, files or {}, log), program.seconds)
    except asyncio.TimeoutError:
        pass
    finally:
        await running.end()
    seconds, output = time.monotonic() - started, bytes(log[-MAX_OUTPUT:]).decode("utf-8", "replace")
    if last is None:
        return ProgramResult(None, output, seconds=seconds)
    if "error" in last:
        raise SandboxError(f"the agent program cannot be started: {last['error']}", retryable=False)
    contents = last["files"]
    found = {str(name): str(text)[:MAX_FILE] for name, text in contents.items() if name in program.keep_files}
    return ProgramResult(last["exit"], output, found, seconds)


async def _communicate(
    process: asyncio.subprocess.Process, files: Mapping[str, bytes], log: bytearray
) -> dict[str, Any]:
    """Send the files, collect what the program prints, and return the forwarder's last line."""
    assert process.stdin is not None
    assert process.stdout is not None
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    process.stdin.write(json.dumps(encoded).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()

    async def collect() -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(1 << 16):
            log.extend(part)
            del log[: -2 * MAX_OUTPUT]

    collecting = asyncio.ensure_future(collect())
    try:
        line = await process.stdout.readline()
        if not line:
            await collecting
            if await process.wait() in _NOT_STARTED:
                return {"error": bytes(log[-500:]).decode("utf-8", "replace")}
        result = _read_result(line)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(collecting), 1.0)
        return result
    finally:
        collecting.cancel()


def _read_result(line: bytes) -> dict[str, Any]:
    """The forwarder's last line. One that is missing or malformed is the agent's doing, which killed or changed it."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        result = None
    if isinstance(result, dict) and ("error" in result or isinstance(result.get("exit"), int)):
        return {"files": {}, **result} if isinstance(result.get("files", {}), dict) else {**result, "files": {}}
    return {"exit": -9, "files": {}}


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders once: what is put in holds none."""
    return _PLACEHOLDER.sub(lambda found: values[found[0]].replace("\0", ""), text)
