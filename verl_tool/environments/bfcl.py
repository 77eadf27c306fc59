"""BFCL's multi-turn tasks, played and checked by the package bfcl-eval in a Python of its own.

    python -m verl_tool.environments rows bfcl multi_turn_base --output rows.parquet -o python=/opt/bfcl/bin/python
    python -m verl_tool.servers.ray_serve --tool_type bfcl --tool_config '{"tools": [{"name": "bfcl", "python": "…"}]}'

A row has a task of the package, or one of the same form: classes with functions, their initial state, and the user's
messages. The next message comes when the model answers without a call. At the end the package's checker compares states
and answers after each turn with those of the ground truth
(https://gorilla.cs.berkeley.edu/blogs/13_bfcl_v3_multi_turn.html).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from verl_tool.environments.environment_tool import Environment, EnvironmentState
from verl_tool.environments.inside import bfcl_server
from verl_tool.errors import ConfigError, StartError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind, Opening, ToolDescription
from verl_tool.servers.tools.base import InvalidCall, ToolOptions, ToolResult
from verl_tool.util.json_lines_process import kill_process, read_answer
from verl_tool.verification import ENVIRONMENT_STYLE, Verdict

PROGRAM = Path(bfcl_server.__file__)
SYSTEM = "Fulfil the user's requests by calling functions. Answer without a call when one is done or cannot be done."
"""System message of the rows that `read_rows` makes."""
ADDED = "I have updated some more functions you can choose from. What about now?"
"""What the user says when functions are added, as in the package."""
START_SECONDS = 120.0
ROWS_SECONDS = 300.0
MAX_LINE_BYTES = 8 << 20
"""Of one message between the processes."""
_ENVIRONMENT = {"LANG": "C.UTF-8"}
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The package's names of types, and JSON schema's."""


class BfclOptions(ToolOptions):
    """Where the package is, and limits of an episode."""

    python: Path | None = None
    """Interpreter of the environment that has bfcl-eval, such as ``/opt/bfcl/bin/python``. It must be set."""
    max_calls: int = Field(default=40, ge=1)
    """Calls for one message of the user's; a further one ends the episode."""
    call_seconds: float = Field(default=60.0, gt=0)
    """Deadline of a call."""
    memory_mb: int = Field(default=1024, ge=64)
    """Address space of an episode's process, megabytes of 2**20 bytes."""
    cpu_seconds: int = Field(default=15, ge=1)
    """Processor time of an episode."""


@dataclass
class BfclSession:
    """One episode: its connection, and the calls of each turn of the user."""

    entry: Mapping[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: Process
    """That forked the episode's process."""
    tools: list[ToolDescription]
    """Those that the model may call by now."""
    later: dict[str, list[ToolDescription]]
    """Those that are added with a turn, by its number."""
    turns: list[list[list[str]]] = field(default_factory=lambda: [[]])


class BfclEnvironment(Environment):
    """All episodes share a server process, which forks for each."""

    name = "bfcl"
    description = "BFCL's multi-turn tasks."
    max_live = 256
    Options = BfclOptions
    options: BfclOptions
    _process: Process | None = None
    _folder: Path | None = None

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Raises StartError with what the process printed."""
        if self.options.python is None:
            raise StartError("environment bfcl needs the option python, an interpreter that has bfcl-eval")
        self._folder = Path(tempfile.mkdtemp(prefix="bfcl"))
        limits = (str(self.options.memory_mb << 20), str(self.options.cpu_seconds))
        command = [_absolute(str(self.options.python)), "-I", str(PROGRAM), "serve", str(self._socket), *limits]
        try:
            with open(self._folder / "stderr", "wb") as log:  # noqa: ASYNC230 - an empty file, once
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, stdout=PIPE, stderr=log, env=_ENVIRONMENT, cwd=self._folder
                )
            await asyncio.wait_for(read_answer(self._process), START_SECONDS)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            printed = (self._folder / "stderr").read_bytes()[-500:].decode("utf-8", "replace").strip()
            await self.close()
            words = f"{self.options.python} cannot serve bfcl-eval: {error or 'no answer'}; {printed}"
            remedy = "install bfcl-eval in an environment of its own, and set the option python to its interpreter"
            raise StartError(f"{words}\n{remedy}") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._process is not None:
            await kill_process(self._process)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def opening(self, state: EnvironmentState) -> Opening:
        """Functions that a turn added can be called from then on."""
        return state.opening.model_copy(update={"tools": state.session.tools})

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[BfclSession, Opening]:
        entry = _check_entry(arguments.get("entry"))
        server = await self._running_server()
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=MAX_LINE_BYTES)
        except OSError as error:
            words = f"no connection to the process of bfcl-eval: {error}"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error
        session = BfclSession(entry, reader, writer, server, [], {})
        try:
            answer = await self._ask(session, {"entry": dict(entry)})
            if "error" in answer:
                words = f"bfcl-eval: {answer['error']}; correct the row"
                raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        except BaseException:
            await self.end(session)
            raise
        self._sort_tools(session, answer["functions"])
        messages = [dict(message) for message in entry["question"][0]]
        return session, Opening(messages=messages, tools=list(session.tools), every_turn=True)

    async def step(self, session: BfclSession, call: Call) -> ToolResult:
        if call.name == self.name:
            return self._next_turn(session)
        if sum(len(step) for step in session.turns[-1]) >= self.options.max_calls:
            words = f"Error: more than {self.options.max_calls} calls."
            return ToolResult(words, done=True, truncated=True, error=True)
        text = _write_call(call, session.tools)
        session.turns[-1].append([text])
        answer = await self._ask(session, {"call": text})
        result = str(answer.get("result", f"Error: {answer.get('error')}"))
        return ToolResult(result, error="result" not in answer or result.startswith("Error during execution"))

    async def verdict(self, session: BfclSession, text: str, data: Mapping[str, Any], rewards: list[float]) -> Verdict:
        truth = data.get("turns")
        if not isinstance(truth, list) or len(truth) != len(session.entry["question"]):
            words = "the ground truth needs turns, a list of calls for each message of the user"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        answer = await self._ask(session, {"turns": session.turns, "truth": truth}, self.verdict_seconds)
        if "error" in answer or "crashed" in answer:  # by the row, or by the policy's calls, which run again
            kind = FaultKind.MISCONFIGURED if "error" in answer else FaultKind.TOOL_CRASHED
            words = f"bfcl-eval's checker: {answer.get('error') or answer['crashed']}"
            raise ToolFault(kind, words, retryable=False)
        why = "" if answer["valid"] else f"{answer['error_type']}: {answer['error_message']}"
        return Verdict(float(bool(answer["valid"])), told=why, numbers={"user_turns": float(len(session.turns))})

    @property
    def verdict_seconds(self) -> float:
        """Long enough for calls that use up `cpu_seconds` on a busy machine: their process is ended before."""
        return max(self.options.call_seconds, 4.0 * self.options.cpu_seconds)

    async def end(self, session: BfclSession) -> None:
        session.writer.close()

    @property
    def _socket(self) -> Path:
        assert self._folder is not None
        return self._folder / "socket"

    async def _running_server(self) -> Process:
        """Return the server process, a new one in place of one that has exited. Raises ToolFault."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self.close()
                try:
                    await self.start()
                except StartError as error:
                    raise ToolFault(FaultKind.UNREACHABLE, str(error), retryable=False) from error
            assert self._process is not None
            return self._process

    def _next_turn(self, session: BfclSession) -> ToolResult:
        """The user reads nothing; the next message comes in any case."""
        number = len(session.turns)
        if number >= len(session.entry["question"]):
            return ToolResult(done=True, role="user")
        session.turns.append([])
        texts = [str(message["content"]) for message in session.entry["question"][number]]
        added = session.later.get(str(number), [])
        session.tools += added
        if added:
            shown = [each.model_dump(include={"name", "description", "parameters"}) for each in added]
            texts += [f"{json.dumps(shown)}\n{ADDED}"]
        return ToolResult("\n".join(texts), role="user")

    async def _ask(
        self, session: BfclSession, question: Mapping[str, Any], seconds: float | None = None
    ) -> dict[str, Any]:
        """Send a question and wait for `seconds` (default: `call_seconds`). Raises ToolFault: an episode's own process
        ends by what its policy made it do, unless the server ended."""
        seconds = seconds or self.options.call_seconds
        try:
            session.writer.write(json.dumps(question).encode() + b"\n")
            await session.writer.drain()
            line = await asyncio.wait_for(session.reader.readline(), seconds)
        except asyncio.TimeoutError as error:
            words = f"bfcl-eval gave no answer within {seconds:g} s (call_seconds)"
            raise ToolFault(FaultKind.TIMEOUT, words, retryable=False) from error
        except (OSError, ValueError):
            line = b""
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        if session.server.returncode is not None:
            words = "the process of bfcl-eval has exited, and with it the state of the episode"
            raise ToolFault(FaultKind.STATE_LOST, words, retryable=False)
        words = "the episode's process took too much memory (memory_mb) or time (cpu_seconds), or wrote too much"
        raise ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)

    @staticmethod
    def _sort_tools(session: BfclSession, functions: Sequence[Mapping[str, Any]]) -> None:
        described = {str(function["name"]): _describe(function) for function in functions}
        missing = session.entry.get("missed_function") or {}
        for number, names in missing.items():
            session.later[number] = [described.pop(name) for name in names if name in described]
        session.tools = [*described.values()]


def _absolute(python: str) -> str:
    """The path of an interpreter for a process with another working folder. Links are kept: that of a virtual
    environment is one."""
    return os.path.abspath(shutil.which(python) or python)


def read_rows(source: str, *, python: str) -> Iterator[dict[str, Any]]:
    """Yield verl's rows of a category of the package, such as ``multi_turn_base``; `python` as in `BfclOptions`.

    Raises ConfigError with what the process printed.
    """
    if not source.replace("_", "").isalnum():
        raise ConfigError(f"source is {source!r}; name a category of bfcl-eval, such as multi_turn_base")
    command = [python, "-I", str(PROGRAM), "rows", source]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ROWS_SECONDS, env=_ENVIRONMENT, check=True)
    except subprocess.CalledProcessError as error:
        words = error.stderr[-500:].decode("utf-8", "replace").strip()
        raise ConfigError(f"{python} finds no tasks {source!r} of bfcl-eval: {words}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} cannot be run: {error}; set python") from error
    for number, line in enumerate(done.stdout.splitlines()):
        task = json.loads(line)
        yield {
            "data_source": f"bfcl_{source}",
            "prompt": [{"role": "system", "content": SYSTEM}],
            "ability": "function_calling",
            "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": {"turns": task["truth"]}},
            "extra_info": {
                "index": number,
                "id": task["entry"]["id"],
                "tools_kwargs": {"environment": {"name": "bfcl", "entry": task["entry"]}},
            },
            "agent_name": "verltool_agent",
            "use_tool": True,
        }


def _check_entry(entry: object) -> Mapping[str, Any]:
    """Raises ToolFault that names what is missing."""
    needed = {"id": str, "question": list, "initial_config": dict, "involved_classes": list}
    if isinstance(entry, Mapping):
        wrong = [name for name, kind in needed.items() if not isinstance(entry.get(name), kind)]
        if not wrong and entry["question"] and entry["question"][0]:
            return entry
    else:
        wrong = ["entry"]
    words = f"tools_kwargs.environment.entry must be a task of bfcl-eval; wrong: {', '.join(wrong) or 'question'}"
    raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)


def _describe(function: Mapping[str, Any]) -> ToolDescription:
    """A function's documentation, as the package has it."""
    return ToolDescription(
        name=str(function["name"]),
        description=str(function["description"]),
        parameters=_as_schema(function["parameters"]),
    )


def _as_schema(value: Any) -> Any:
    """Rename the types of a schema of the package. A parameter may itself be called ``type``."""
    if isinstance(value, list):
        return [_as_schema(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    renamed = {name: _as_schema(each) for name, each in value.items()}
    return {**renamed, "type": _TYPES.get(kind, kind)} if isinstance(kind, str) else renamed


def _write_call(call: Call, tools: Sequence[ToolDescription]) -> str:
    """The call as the package evaluates it: a known function with literals. Raises InvalidCall with words for the
    model."""
    known = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
    if call.name not in known:
        raise InvalidCall(f"there is no function {call.name[:80]!r}")
    arguments = call.arguments or {}
    unknown = [name for name in arguments if name not in known[call.name]]
    if unknown:
        words = ", ".join(known[call.name]) or "none"
        raise InvalidCall(f"{call.name} has no argument {unknown[0][:80]!r}; known: {words}")
    text = f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    try:
        return bfcl_server.checked_call(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise InvalidCall("the arguments must be texts, numbers, lists and objects") from error
