"""Runs the model's commands in one bash on a terminal: directory, variables and background jobs stay.

A command that takes too long is interrupted, and the shell stays. Programs that wait for input are sent keys. With the
option ``stateless`` each command is a bash of its own, of which only the files stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import AliasChoices, Field

from verl_tool.formats import Call
from verl_tool.sandbox.backends import Sandbox
from verl_tool.servers.tools._programs import cut_middle, written_by
from verl_tool.servers.tools.base import CallError, Context, InvalidCall, ToolResult
from verl_tool.servers.tools.workspace.screen import plain_text
from verl_tool.servers.tools.workspace.terminal import Terminal, TerminalOutput
from verl_tool.servers.tools.workspace.workspace import Workspace, WorkspaceOptions, WorkspaceTool

NO_OUTPUT = "(no output)"
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of what the last command of a stateless trajectory writes, as mini-swe-agent has it."""
_HOW = 'Give the command as {"command": "ls -l"}, or keys for a program that runs as {"keys": ["print(1)", "Enter"]}.'
_KEY_SECONDS = 1.0
_NAMED = {
    **{"Enter": "\r", "Tab": "\t", "Escape": "\x1b", "Space": " ", "BSpace": "\x7f"},
    **{"Up": "\x1b[A", "Down": "\x1b[B", "Right": "\x1b[C", "Left": "\x1b[D", "Home": "\x1b[H", "End": "\x1b[F"},
    **{"PageUp": "\x1b[5~", "PageDown": "\x1b[6~", "Delete": "\x1b[3~"},
}
"""Keys by the names that tmux has for them; ``C-a`` to ``C-z`` besides."""
_CONTROL = re.compile(r"C-([A-Za-z\\\]^_])")


class BashTerminalOptions(WorkspaceOptions):
    """As of every tool with a workspace, and whether there is a shell that stays."""

    timeout_seconds: float = Field(default=30.0, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    """Wall time of one command."""
    stateless: bool = False
    """Each command is run by a bash of its own; the observation is a JSON object of ``returncode`` and ``output``."""


class BashTerminalTool(WorkspaceTool):
    """Commands in the shell of the trajectory's workspace."""

    name = "bash_terminal"
    aliases = ("bash", "sh", "shell", "terminal", "execute_bash")
    description = (
        "Runs a command in a bash shell, which stays for your next calls with its directory, variables and background "
        "jobs, and returns its output. A program that waits for input is sent keys."
    )
    parameters: ClassVar = {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "what to run; wait for it to end"},
            "keys": {
                "type": "array",
                "items": {"type": "string"},
                "description": "instead of a command: texts and keys to type, such as Enter, Up, C-c; a program that "
                "they start is not waited for",
            },
            "seconds": {"type": "number", "description": "how long to wait at most"},
        },
    }
    example_actions = (
        "```bash\necho $((1 + 1))\n```",
        "<bash>echo $((1 + 1))</bash>",
        "<terminal>echo $((1 + 1))</terminal>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((1 + 1))"}}\n</tool_call>',
    )
    Options = BashTerminalOptions
    options: BashTerminalOptions

    async def run(self, call: Call, context: Context) -> ToolResult:
        workspace: Workspace = context.state
        arguments: Mapping[str, Any] = (
            {"command": call.input.strip("\r\n")} if call.arguments is None else call.arguments
        )
        command = next((arguments[key] for key in ("command", "cmd", "code", "input") if key in arguments), None)
        keys = arguments.get("keys", arguments.get("send_keys"))
        if (command is None) == (keys is None):
            raise InvalidCall(_HOW)
        try:
            if keys is not None:
                return await self._type(keys, _seconds(arguments, _KEY_SECONDS), workspace)
            if not isinstance(command, str):
                raise InvalidCall(_HOW)
            seconds = min(_seconds(arguments, self.options.timeout_seconds), self.options.timeout_seconds)
            if self.options.stateless:
                return await self._run_alone(command, seconds, workspace.session)
            return self._describe(await workspace.part(Terminal).run(command, seconds, self._bytes), seconds)
        except CallError as error:
            return ToolResult(str(error), error=True)

    @property
    def _bytes(self) -> int:
        """Enough of a terminal's output for an observation, whatever it is written in."""
        return 8 * self.options.max_output_length

    async def _type(self, keys: object, seconds: float, workspace: Workspace) -> ToolResult:
        if self.options.stateless:
            raise InvalidCall("there is no terminal to send keys to: every command has a shell of its own")
        typed = b"".join(_typed(key) for key in ([keys] if isinstance(keys, str) else _texts(keys)))
        output = await workspace.part(Terminal).type(typed, min(seconds, self.options.timeout_seconds), self._bytes)
        return self._describe(output, seconds)

    async def _run_alone(self, command: str, seconds: float, session: Sandbox) -> ToolResult:
        result = await session.exec(command, wall_seconds=seconds)
        output = cut_middle(plain_text(written_by(result).encode()), self.options.max_output_length)
        first, _, rest = output.partition("\n")
        if first.strip() == SUBMIT and result.ok:
            return ToolResult(rest, done=True)
        ending = f"\n[ended by the limit {result.limit_hit}]" if result.limit_hit else ""
        code = result.exit_code if result.exit_code is not None else -(result.signal or 1)
        text = json.dumps({"returncode": code, "output": output + ending}, ensure_ascii=False)
        return ToolResult(text, error=not result.ok, metrics={"timed_out": float(result.timed_out)})

    def _describe(self, shown: TerminalOutput, seconds: float) -> ToolResult:
        lines = [_another(shown.lost), cut_middle(shown.text.strip("\n"), self.options.max_output_length)]
        if shown.interrupted:
            lines.append(f"[the command was interrupted: it ran longer than {seconds:g} seconds]")
        lines.append(_another(shown.ended))
        if shown.running:
            lines.append("[a program runs in the foreground and takes keys]")
        if shown.exit_code:
            lines.append(f"Exit code: {shown.exit_code}")
        failed = shown.interrupted or bool(shown.ended) or bool(shown.exit_code)
        text = "\n".join(line for line in lines if line) or NO_OUTPUT
        return ToolResult(text, error=failed, metrics={"timed_out": float(shown.interrupted)})


def _another(why: str) -> str:
    return why and f"[{why}; a new one has started: variables and jobs are gone, files are not]"


def _seconds(arguments: Mapping[str, Any], default: float) -> float:
    """Raises InvalidCall if what is given is no number above 0."""
    value = arguments.get("seconds", arguments.get("timeout", default))
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidCall(f"seconds is {value!r:.80}; give a number above 0")
    return seconds


def _texts(keys: object) -> Sequence[str]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise InvalidCall(f"keys is {keys!r:.80}; give a list of texts and names of keys")
    return keys


def _typed(key: str) -> bytes:
    """What a terminal gets for a text or the name of a key."""
    control = _CONTROL.fullmatch(key)
    if control is not None:
        return bytes([ord(control[1].upper()) & 0x1F])
    return _NAMED.get(key, key).encode("utf-8", "replace")
