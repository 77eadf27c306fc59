"""Runs programs in many languages at a Piston server.

API: engineer-man/piston, ``docs/api-v2.md`` and the section "Usage" of its readme: ``GET /api/v2/runtimes`` and
``POST /api/v2/execute``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from verl_tool.errors import ToolFault
from verl_tool.formats import Call
from verl_tool.formats.json_call import decode
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools._remote_code import (
    COMPILATION,
    EXECUTION,
    START_SECONDS,
    RemoteCodeOptions,
    RemoteCodeTool,
    RemoteProgram,
    Stage,
    ending_of,
    language_of,
    not_served,
)
from verl_tool.servers.tools._service import ServiceRejectedError
from verl_tool.servers.tools.base import Context, InvalidCall

API = "/api/v2"
_USUAL = ("python", "bash", "c", "cpp", "csharp", "go", "java", "javascript", "php", "ruby", "rust", "typescript")
_TIMED_OUT, _TOO_MUCH, _INTERNAL = "TO", ("OL", "EL"), "XX"
"""Piston's own words for how a stage ended."""
_MAX_FILES = 32
_FILE_NAME = re.compile(r"(?!\.+$)[\w.+ -]{1,200}", re.ASCII)
_ELEMENT = re.compile(r"<(?P<name>language|version|args|stdin)>(?P<text>.*?)</(?P=name)>", re.DOTALL)
_FILE = re.compile(r'<file(?:\s+name="(?P<name>[^"]*)")?\s*>\n?(?P<content>.*?)</file>', re.DOTALL)


class _Runtime(BaseModel):
    language: str
    version: str
    aliases: list[str] = []


class _StageAnswer(BaseModel):
    stdout: str = ""
    stderr: str = ""
    output: str | None = None
    code: int | None = None
    signal: str | None = None
    message: str | None = None
    status: str | None = None
    wall_time: float | None = None
    """Milliseconds."""


class _Answer(BaseModel):
    run: _StageAnswer
    compile: _StageAnswer | None = None


_RUNTIMES = TypeAdapter(list[_Runtime])


class PistonOptions(RemoteCodeOptions):
    """Those of a service, with Piston's usual address and limits."""

    url: str = "http://127.0.0.1:2000"
    """Address of the server; ``/api/v2`` is added to one without a path."""
    languages: tuple[str, ...] = Field(default=_USUAL, min_length=1)
    timeout_seconds: float = Field(default=3.0, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    """Wall time of one program; not more than the server's ``PISTON_RUN_TIMEOUT``, which is 3 s by default."""


class PistonTool(RemoteCodeTool):
    """One `POST /api/v2/execute` a program."""

    name = "piston"
    service_name = "Piston"
    description = "Runs a program in one of several languages and returns what it prints. Every call starts afresh."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            **RemoteCodeTool.parameters["properties"],
            "version": {"type": "string", "description": "of the language; the newest one if it is left out"},
            "args": {"type": "array", "items": {"type": "string"}, "description": "arguments of the program"},
            "files": {
                "type": "array",
                "description": "in place of code: the program's files, the main one first",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "content": {"type": "string"}},
                    "required": ["content"],
                },
            },
        },
        "required": [],
    }
    example_actions = (
        "```python\nprint(1 + 1)\n```",
        "<python>print(1 + 1)</python>",
        "<tool>print(1 + 1)</tool>",
        '<tool_call>{"name": "piston", "arguments": {"language": "python", "code": "print(1 + 1)"}}</tool_call>',
        '<piston>\n<language>python</language>\n<file name="main.py">\nprint(1 + 1)\n</file>\n</piston>',
    )
    Options = PistonOptions
    options: PistonOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._names: dict[str, str] = {}
        """Of the server's languages, by each of their names."""

    @staticmethod
    def service_url(url: str) -> str:
        url = url.removesuffix("/execute").removesuffix("/runtimes")
        return url if urlsplit(url).path else f"{url}{API}"

    async def probe(self) -> None:
        runtimes = await self._runtimes()
        if not runtimes:
            raise ServiceRejectedError("Piston has no language; install some")
        self._names = {name: each.language for each in runtimes for name in (each.language, *each.aliases)}
        first = self._names.get(self.options.languages[0], runtimes[0].language)
        await self.service.ask("POST", "/execute", self._body(first, "*", [{"content": ""}], "", []), START_SECONDS)

    async def _runtimes(self) -> list[_Runtime]:
        answer = await self.service.ask("GET", "/runtimes", None, START_SECONDS)
        try:
            return _RUNTIMES.validate_python(answer)
        except ValidationError as error:
            raise self.service.malformed(answer) from error

    def join(self, calls: Sequence[Call]) -> list[Call]:
        join = super().join
        groups = groupby(calls, key=lambda call: _structured(call) is None)
        return [call for is_text, group in groups for call in (join(list(group)) if is_text else group)]

    def program(self, call: Call, context: Context) -> RemoteProgram:
        arguments = _structured(call)
        if arguments is None and (call.arguments or {}).get("files") is None:
            return super().program(call, context)
        fields = call.arguments or {} if arguments is None else arguments
        return super().program(replace(call, input="", arguments={**fields, "code": ""}), context)

    async def run_program(self, program: RemoteProgram) -> Sequence[Stage]:
        language = self._served(program.language)
        version = str(program.arguments.get("version") or "*")
        body = self._body(language, version, _files(program), program.stdin, _args(program.arguments))
        try:
            answer = await self.service.ask("POST", "/execute", body, self.seconds())
        except ServiceRejectedError as error:
            if "runtime is unknown" in str(error):
                raise InvalidCall(f"version {version[:40]!r} of {language} is not served here; leave it out") from error
            raise
        try:
            outcome = _Answer.model_validate(answer)
        except ValidationError as error:
            raise self.service.malformed(answer) from error
        compiled = [self._stage(outcome.compile, COMPILATION)] if outcome.compile is not None else []
        return compiled if compiled and not compiled[0].ok else [*compiled, self._stage(outcome.run, EXECUTION)]

    def _served(self, language: str) -> str:
        """The server's own name of a language. Raises InvalidCall."""
        if language in self._names:
            return self._names[language]
        found = next((own for name, own in self._names.items() if language_of(name) == language), None)
        if found is None:
            raise not_served(language, set(self._names.values()))
        return found

    def _body(
        self, language: str, version: str, files: Sequence[Mapping[str, str]], stdin: str, args: Sequence[str]
    ) -> dict[str, Any]:
        options = self.options
        body: dict[str, Any] = {
            "language": language,
            "version": version,
            "files": list(files),
            "stdin": stdin,
            "args": list(args),
            "run_timeout": round(options.timeout_seconds * 1000),
            "compile_timeout": round(options.compile_seconds * 1000),
        }
        return body if options.max_memory_mb is None else {**body, "run_memory_limit": options.max_memory_mb << 20}

    def _stage(self, told: _StageAnswer, what: str) -> Stage:
        if told.status == _INTERNAL:
            words = f"Piston at {self.service.url} did not run the program: {told.message or 'status XX'}"
            raise ToolFault(FaultKind.SANDBOX, words, retryable=True)
        timed_out, too_much = told.status == _TIMED_OUT, told.status in _TOO_MUCH
        ending = ending_of(
            what,
            timed_out=timed_out,
            seconds=self.options.compile_seconds if what == COMPILATION else self.options.timeout_seconds,
            signal=told.signal,
            code=told.code,
            told=bool(told.stderr.strip()),
        )
        if too_much:
            ending = f"{what} was ended: it wrote more than the server keeps."
        elif told.signal == "SIGKILL" and told.status is None:  # older servers do not tell why
            ending = f"{what} was ended: it ran too long, wrote too much or used too much memory."
        output = told.output if told.output is not None else f"{told.stdout}{told.stderr}"
        return Stage(output, ending, told.code == 0 and not told.signal, timed_out, (told.wall_time or 0.0) / 1000)


def _structured(call: Call) -> dict[str, Any] | None:
    """The arguments in a text that holds elements, or a JSON object; None if it is a program."""
    text = call.input.strip()
    if call.arguments is not None or call.name != PistonTool.name:
        return None
    if text.startswith("<language>"):
        elements = _ELEMENT.finditer(_FILE.sub("", text))
        found: dict[str, Any] = {match["name"]: match["text"].strip() for match in elements}
        files = [{"name": match["name"] or "", "content": match["content"]} for match in _FILE.finditer(text)]
        return {**found, "args": found.get("args", "").split(), "files": files}
    if not text.startswith("{"):
        return None
    try:
        value = decode(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "files" in value else None


def _files(program: RemoteProgram) -> list[dict[str, str]]:
    """What is sent as the program. Raises InvalidCall."""
    files = program.arguments.get("files")
    if files is None:
        return [{"content": program.code}]
    if not isinstance(files, list) or not 0 < len(files) <= _MAX_FILES:
        raise InvalidCall(f"files must be a list of 1 to {_MAX_FILES} objects with name and content")
    return [_file(each) for each in files]


def _file(given: Any) -> dict[str, str]:
    content = given.get("content") if isinstance(given, Mapping) else None
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(content, str) or not (name is None or isinstance(name, str)):
        raise InvalidCall("each of the files must be an object with a text as content, and a name")
    if name and not _FILE_NAME.fullmatch(name):
        raise InvalidCall(f"the name {name[:40]!r} of a file is not one such as 'main.py', without a folder")
    return {"name": name, "content": content} if name else {"content": content}


def _args(given: Mapping[str, Any]) -> list[str]:
    args = given.get("args") or []
    if not isinstance(args, list) or not all(isinstance(each, str) and "\0" not in each for each in args):
        raise InvalidCall("args must be a list of texts")
    return args
