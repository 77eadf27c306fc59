"""A program that acts as the agent of a session: in the sandbox, where it reaches the gateway and nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.gateway.gateway_app import SESSIONS_PATH
from verl_tool.gateway.inside.python_program import ROW_FILE
from verl_tool.gateway.presets import MCP_PRESETS, PRESETS
from verl_tool.gateway.program.container_program import ContainerOptions, ContainerService, ProgramContainers
from verl_tool.gateway.program.workspace_verifier import COPY_SECONDS, WorkspaceCopy
from verl_tool.protocol import WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD
from verl_tool.sandbox.backends.resident_client import ResidentProgram
from verl_tool.sandbox.backends.row_limits import check_row_limits
from verl_tool.sandbox.limits import Limits
from verl_tool.sandbox.sandboxed_service import RunningService, SandboxedService, ServiceSandbox
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

PORT = 8000
"""Of the gateway, on the loopback device of each program's sandbox."""
MAX_OUTPUT = 64 << 10
"""Bytes of a program's output that are kept: the last ones."""
MAX_FILE = 256 << 10
"""Bytes of a file that is kept."""
MCP_VARIABLE = "MCP_URL"
_INSIDE = Path(__file__).parent / "inside"
_FORWARDER = (_INSIDE / "forwarder.py").read_text(encoding="utf-8")
_PYTHON_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path)\n" + (_INSIDE / "python_program.py").read_text(
    "utf-8"
)
"""No module of its working directory is imported in place of the standard library's."""
_LINE_BYTES = 64 << 20
_OPEN_FILES, _DISK_BYTES, _DISK_FILES = 4096, 1 << 30, 1 << 16
_IMAGES_OWN = frozenset({"/", "/usr", "/usr/local"})
"""Folders of an image that nothing may be mounted over."""
_MAX_ARGUMENT = 2000
"""Characters of an argument that a record has."""
_CONTEXT_TOKENS = 200_000
_PLACEHOLDER = re.compile(r"\{(?:task|system|prompt|messages|base_url|key|session|context|mcp_url|environment)\}")
_NOT_STARTED = (126, 127)
"""Status of a program that cannot be started in the sandbox, or in a container."""


class AgentProgram(BaseModel):
    """How the program is started. Placeholders in `command` and `env` are replaced:

    | Placeholder | Value |
    |---|---|
    | ``{task}`` | text of the row's last message |
    | ``{system}`` | text of its system messages |
    | ``{prompt}`` | ``{system}``, an empty line, and ``{task}``; without a system message ``{task}`` |
    | ``{messages}`` | all its messages as JSON |
    | ``{base_url}``, ``{key}``, ``{session}`` | of the session |
    | ``{context}`` | tokens of the model's context |
    | ``{mcp_url}`` | of the session's tools |
    | ``{environment}`` | the row's ``tools_kwargs.environment`` as JSON |
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    """The program and its arguments. A program without a folder is looked for next to the Python in use, then on
    PATH."""
    python: str | None = None
    """In place of `command`: ``FILE:NAME`` or ``package.module:NAME``, a function ``(session, row)`` or a class with
    ``run(session, row)``, either of them sync or async (`inside.python_program`)."""
    preset: str | None = None
    """In place of `command`: an agent of `PRESETS`, such as ``claude_code``."""
    install: str = ".agents"
    """The folder that `scripts/install_agents.sh` installed the preset's agent into."""
    env: dict[str, str] = Field(default_factory=dict)
    """In addition to ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``."""
    context_tokens: int | None = Field(default=None, ge=1)
    """The model's context, for ``{context}``: agents compact their conversation before it is full. None: that of the
    rollout engine in training, 200,000 elsewhere."""
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
    judges: bool = False
    """It plays in the environment of the row's ``tools_kwargs.environment``, and writes the verdict to the descriptor
    in ``VERL_TOOL_VERDICT_FD``: a JSON object with the number ``reward``, and other numbers; or with the text
    ``misconfigured``, a fault that no policy can cause."""
    keep_files: tuple[str, ...] = ()
    """Files in its working directory whose contents are kept in the record, such as an answer to grade."""
    max_copy_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Of its working directory as a tar, of which a row's verifier gets a copy. Eight are in memory at a time."""

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

    def choose_place(
        self, sandbox: ServiceSandbox, row_image: str | None = None, row_limits: WorkspaceLimits = NO_LIMITS
    ) -> ServiceSandbox | ProgramContainers:
        """Where it runs: in `sandbox`, or in containers. row_image, row_limits: a row's own, in place of the program's.

        Raises ConfigError if the program has no image, or a row requests more than it allows.
        """
        if self.image is not None:
            options, memory_mb = self.container, self.memory_bytes >> 20
            check_row_limits(
                row_limits,
                options.max_row_cpus or options.cpus,
                options.max_row_memory_mb or memory_mb,
                options.allowed_hosts,
            )
            return ProgramContainers(row_image or self.image, options, self.limits, row_limits)
        for name, value in ((WORKSPACE_IMAGE_FIELD, row_image), (WORKSPACE_LIMITS_FIELD, row_limits)):
            if value not in (None, NO_LIMITS):
                raise ConfigError(f"tools_kwargs.{name}={value!r:.100} needs gateway.program.image, the default")
        return sandbox

    def resolve(self) -> AgentProgram:
        """The program with its preset filled in. Raises ConfigError if it names none or several, a preset that is not
        installed, or a Python file that is not there."""
        options = {"command": self.command, "python": self.python, "preset": self.preset}
        used = [name for name, value in options.items() if value]
        if len(used) != 1:
            what = f"has {' and '.join(used)}" if used else "has none of command, python and preset"
            raise ConfigError(f"gateway.program {what}; set one of them")
        if self.python is not None:
            return self.model_copy(update=_find_python(self.python, self.readable))
        if self.preset is None:
            return self
        if self.preset not in PRESETS:
            raise ConfigError(f"gateway.program.preset={self.preset} is unknown; known: {', '.join(PRESETS)}")
        install = Path(self.install).absolute()
        if not install.is_dir():
            hint = f"run bash scripts/install_agents.sh {self.install}"
            raise ConfigError(f"gateway.program.install={self.install} is not a folder; {hint}")
        if self.mcp and self.preset not in MCP_PRESETS:
            able = ", ".join(sorted(MCP_PRESETS))
            raise ConfigError(
                f"gateway.program.mcp: the preset {self.preset} is not configured for MCP; those that are: {able}"
            )
        preset = PRESETS[self.preset](install)
        update = {
            "command": preset.command,
            "env": preset.env | self.env,
            "readable": (*preset.readable, *self.readable),
            "preset": None,
            "judges": preset.judges,
        }
        hidden = _IMAGES_OWN.intersection(preset.readable) if self.image is not None else ()
        if hidden:
            raise ConfigError(
                f"gateway.program.preset={self.preset} runs with the Python in {min(hidden)}, which would hide what "
                "the image has there; install the agents with a Python that has a folder of its own"
            )
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
    verdict: str = ""
    """What a program that judges wrote."""


async def run_program(
    sandbox: ServiceSandbox | ProgramContainers,
    program: AgentProgram,
    session: SessionAddress,
    socket: Path,
    task: str,
    files: Mapping[str, bytes] | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
    executable: Sequence[str] = (),
    copy: WorkspaceCopy | None = None,
    environment: Mapping[str, Any] | None = None,
) -> ProgramResult:
    """Run `program` in a fresh sandbox or container until it exits. socket: Unix socket on which the gateway listens.
    files: put into its working directory first. messages: the conversation that ends with `task`; empty: there is
    nothing else. executable: those of `files` that are programs. copy: takes the files of its working directory at the
    end, also after the time limit. environment: what a program that judges plays in.

    Raises SandboxError if it cannot be started.
    """
    base = f"http://127.0.0.1:{PORT}{SESSIONS_PATH}/{session.id}"
    texts = [{"role": str(each["role"]), "content": str(each.get("content") or "")} for each in messages]
    texts = texts or [{"role": "user", "content": task}]
    system = "\n\n".join(each["content"] for each in texts[:-1] if each["role"] == "system")
    values = {
        "{task}": task,
        "{system}": system,
        "{prompt}": f"{system}\n\n{task}" if system else task,
        "{messages}": json.dumps(texts, ensure_ascii=False),
        "{base_url}": f"{base}/v1",
        "{key}": session.key,
        "{session}": session.id,
        "{context}": str(program.context_tokens or _CONTEXT_TOKENS),
        "{mcp_url}": f"{base}/mcp",
        "{environment}": json.dumps(environment or {}, ensure_ascii=False),
    }
    env = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.key,
        **({MCP_VARIABLE: f"{base}/mcp"} if program.mcp else {}),
        **{name: _fill(text, values) for name, text in program.env.items()},
    }
    command = [_fill(text, values) for text in program.command]
    if program.python is not None:
        command = ["python3", "-c", _PYTHON_PROGRAM, program.python]
        files = {**(files or {}), ROW_FILE: json.dumps({"messages": texts}).encode()}
    service = SandboxedService(
        (
            *("python3", "-I", "-c"),  # no module of the working directory
            _FORWARDER,
            str(socket),
            str(PORT),
            json.dumps(program.keep_files),
            "copy" if copy else "verdict" if program.judges else "",
            *command,
        ),
        readable=(str(socket.parent), *program.readable),
        loopback=True,
    )
    started = time.monotonic()
    running: RunningService | ContainerService = await sandbox.spawn(service, line_bytes=_LINE_BYTES)
    log = bytearray()
    last: dict[str, Any] | None = None
    try:
        last = await asyncio.wait_for(_communicate(running.process, env, files or {}, executable, log), program.seconds)
        if copy is not None and "error" not in last:
            await copy.receive(_stdout(running.process))
    except asyncio.TimeoutError:
        if copy is not None:
            await _end_and_copy(running.process, copy)
    finally:
        await running.end()
    seconds, output = time.monotonic() - started, bytes(log[-MAX_OUTPUT:]).decode("utf-8", "replace")
    if last is None:
        return ProgramResult(None, output, seconds=seconds)
    if "error" in last:
        raise SandboxError(f"the agent program cannot be started: {last['error']}", retryable=False)
    contents = last["files"]
    found = {str(name): str(text)[:MAX_FILE] for name, text in contents.items() if name in program.keep_files}
    return ProgramResult(last["exit"], output, found, seconds, str(last.get("verdict", "")))


async def _communicate(
    process: asyncio.subprocess.Process | ResidentProgram,
    env: Mapping[str, str],
    files: Mapping[str, bytes],
    executable: Sequence[str],
    log: bytearray,
) -> dict[str, Any]:
    """Send environment and files, collect what the program prints, and return the forwarder's last line."""
    assert process.stdin is not None
    assert process.stdout is not None
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    # The environment may have secrets, and other users can read command lines.
    process.stdin.write(json.dumps([dict(env), encoded, *executable]).encode() + b"\n")
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


async def _end_and_copy(process: asyncio.subprocess.Process | ResidentProgram, copy: WorkspaceCopy) -> None:
    """Let the forwarder end the program and send its files."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(asyncio.TimeoutError, ValueError):
        await asyncio.wait_for(_stdout(process).readline(), COPY_SECONDS)
        await copy.receive(_stdout(process))


def _stdout(process: asyncio.subprocess.Process | ResidentProgram) -> asyncio.StreamReader:
    assert process.stdout is not None
    return process.stdout


def _read_result(line: bytes) -> dict[str, Any]:
    """The forwarder's last line. One that is missing or malformed is the agent's doing, which killed or changed it."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        result = None
    if isinstance(result, dict) and ("error" in result or isinstance(result.get("exit"), int)):
        return {"files": {}, **result} if isinstance(result.get("files", {}), dict) else {**result, "files": {}}
    return {"exit": -9, "files": {}}


def _find_python(target: str, readable: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a program for `AgentProgram.python`: a file by its whole path, and readable. Raises ConfigError."""
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"gateway.program.python={target} is not FILE.py:NAME or package.module:NAME")
    if not where.endswith(".py"):
        return {"python": target}
    path = Path(where).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"gateway.program.python={target}: there is no file {path}")
    return {"python": f"{path}:{name}", "readable": (*readable, str(path))}


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders once: what is put in holds none."""
    return _PLACEHOLDER.sub(lambda found: values[found[0]].replace("\0", ""), text)
