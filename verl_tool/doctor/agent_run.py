"""A run of an agent program against a model that writes what it is told to: a call of a tool, and then an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shutil import which
from typing import Any

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.checks.example_call import example_of
from verl_tool.checks.setup import Setup
from verl_tool.errors import ConfigError
from verl_tool.gateway.agent_host import PROGRAM, AgentHost, AgentTask, finish_session
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.conversation import ModelAnswer, Role
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.presets import PRESETS
from verl_tool.gateway.session import SessionModel, SessionOptions
from verl_tool.gateway.session_tree import ModelTurn, Placement, SessionTree
from verl_tool.protocol import ToolDescription

TASK = "Run the command `echo hello` and say what it prints."
ANSWER = "It prints hello."
TITLE = "A short title"
MAX_ANSWERS = 4
"""Answers without a call, after which the program is ended."""
MAX_TOKENS = 1 << 20
"""Of a prompt, where nobody knows the model's window."""
_COMMANDS = ("command", "cmd")
"""Names of an argument that is a command for a shell."""


@dataclass(frozen=True)
class AgentRun:
    """What was seen of one run."""

    record: Trajectory
    exchanges: tuple[tuple[ModelTurn, Placement], ...]
    """Each answer, and what it was asked for with."""
    was_stopped: bool
    """It asked for more answers than `MAX_ANSWERS`, and was ended."""
    seconds: float
    """Its limit."""

    @property
    def program(self) -> Mapping[str, Any]:
        """How it ended; empty if it was ended."""
        described: Mapping[str, Any] = self.record.extra[PROGRAM]
        return described


def program_of(agent: str, install: str, readable: Sequence[str], seconds: float) -> AgentProgram:
    """The program that `agent` names: a preset, or a command line. Raises ConfigError if there is no such program."""
    known = ", ".join(PRESETS)
    common: dict[str, Any] = {"install": install, "readable": tuple(readable), "seconds": seconds}
    preset = agent.strip().replace("-", "_")
    if preset in PRESETS:
        return AgentProgram(preset=preset, **common).resolve()
    try:
        command = tuple(shlex.split(agent))
    except ValueError as error:
        raise ConfigError(f"--agent {agent!r} is no command line: {error}") from error
    if not command or which(command[0]) is None:
        raise ConfigError(f"--agent {agent!r} is not a preset, and no such program is installed; presets: {known}")
    return AgentProgram(command=command, **common)


async def run_agent(
    setup: Setup, program: AgentProgram, options: SessionOptions, task: AgentTask | None = None, turn: str | None = None
) -> AgentRun:
    """Run `program` on `task` in the sandbox. turn: what the model writes first, in place of a call. Raises ConfigError
    if the model has no usable chat template, and SandboxError if there is no sandbox."""
    script = _Script(setup, turn)
    ends = setup.renderer.end_token_ids
    window = setup.context_length or MAX_TOKENS
    gateway = Gateway(SessionModel.create(script, setup.tokenizer, setup.formats, window, ends))
    session = gateway.open_session(options)
    session.tree = script.tree = _ObservedTree(gateway.model.renderer, options.policy)
    program = program.model_copy(update={"context_tokens": program.context_tokens or setup.context_length})
    host = AgentHost(gateway.app(for_agents=True), program)

    try:
        await host.start()
        running = asyncio.ensure_future(host.run(session, task or AgentTask(TASK), partial(finish_session, session)))
        stopping = asyncio.ensure_future(script.exhausted.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        was_stopped = not running.done()
        if was_stopped:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            record = await session.finish()
            record = replace(record, extra={**record.extra, PROGRAM: {}})
        else:
            record = running.result()
    finally:
        await host.close()
    return AgentRun(record, tuple(script.tree.exchanges), was_stopped, program.seconds)


class _ObservedTree(SessionTree):
    """Keeps the requests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.exchanges: list[tuple[ModelTurn, Placement]] = []
        self.placed: list[Placement] = []

    def place(self, request: Any) -> Placement:
        placement = super().place(request)
        self.placed.append(placement)
        return placement

    def add(self, placement: Placement, generation: Generation, answer: ModelAnswer) -> ModelTurn:
        turn = super().add(placement, generation, answer)
        self.exchanges.append((turn, placement))
        return turn


class _Script:
    """Calls a tool at the beginning of a conversation with tools, and answers without a call from then on."""

    def __init__(self, setup: Setup, turn: str | None) -> None:
        self._setup, self._turn = setup, turn
        self.tree: _ObservedTree
        self.exhausted = asyncio.Event()
        self._answers = 0

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        placement = next(each for each in reversed(self.tree.placed) if each.prompt_ids == prompt_ids)
        tools = (*placement.request.tools, *placement.request.deferred_tools)
        is_first = not any(message.role is Role.ASSISTANT for message in placement.messages)
        text = ANSWER
        if is_first and (tools or self._turn is not None):
            text = self._turn or self._call(tools) or ANSWER
        elif is_first and self.tree.exchanges:
            text = TITLE
        else:
            self._answers += 1
            if self._answers > MAX_ANSWERS:
                self.exhausted.set()
        ids = self._setup.tokenizer.encode(text) + self._end()
        return Generation(ids[: sampling_params["max_tokens"]], None, "stop")

    def _call(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """A harmless call of one of `tools`, of one that runs commands if there is any."""
        functions = sorted((tool["function"] for tool in tools), key=lambda each: not _command_of(each))
        for function in functions:
            parameters = function.get("parameters") or {}
            call = {"name": function["name"], "arguments": _arguments(parameters, _command_of(function))}
            example = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            tool = ToolDescription(
                name=function["name"], description="", parameters=parameters, usage="", example_actions=[example]
            )
            found = example_of(self._setup.taught, [tool])
            if found is not None:
                return found.text
        return None

    def _end(self) -> list[int]:
        behind = self._setup.tokenizer.encode(self._setup.closing_text)
        end = next((token for token in behind if token in self._setup.ends), min(self._setup.ends, default=None))
        return [] if end is None else [end]


def _command_of(function: Mapping[str, Any]) -> str | None:
    """The argument of a tool that is a command."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    return next((name for name in _COMMANDS if name in properties), None)


def _arguments(parameters: Mapping[str, Any], command: str | None) -> dict[str, Any]:
    """Values that a schema asks for, as far as its types say."""
    properties = parameters.get("properties") or {}
    values: dict[str, Any] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    arguments = {}
    for name in dict.fromkeys([*([command] if command else []), *(parameters.get("required") or ())]):
        schema = properties.get(name) or {}
        kind = schema.get("type")
        text = "echo hello" if name == command else "hello"
        if name == command and kind == "array":
            arguments[name] = ["sh", "-c", text]
        else:
            arguments[name] = (schema.get("enum") or [values.get(kind, text) if isinstance(kind, str) else text])[0]
    return arguments
