"""What `sandbox_fusion` and `piston` share: programs in several languages, run by a service over HTTP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from pydantic import AliasChoices, Field, SecretStr

from verl_tool.client.exchange import TooLongError
from verl_tool.errors import StartError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools._programs import NO_OUTPUT, code_of, cut_middle, joined, stdin_of
from verl_tool.servers.tools._service import MAX_ANSWER_BYTES, CodeService, ServiceRejectedError, base_url
from verl_tool.servers.tools._without_policy import WithoutPolicy
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult

START_SECONDS = 20.0
"""For the service's first answer."""
COMPILATION, EXECUTION = "Compilation", "Execution"
_GENERAL_NAMES = ("tool", "code_interpreter")
"""Names of calls that tell no language."""
_PYTHON_NAMES = ("PYTHON", "python_executor")
_PYTHON = "python"

LANGUAGES: Mapping[str, tuple[str, ...]] = {
    "bash": ("sh", "shell"),
    "c": (),
    "cpp": ("c++", "cc"),
    "csharp": ("c#", "cs"),
    "d": (),
    "go": ("golang",),
    "haskell": ("hs",),
    "java": (),
    "javascript": ("js", "node", "nodejs"),
    "julia": ("jl",),
    "kotlin": ("kt",),
    "lean": (),
    "lua": (),
    "perl": ("pl",),
    "php": (),
    "python": ("py", "python3"),
    "r": ("R",),
    "racket": (),
    "ruby": ("rb",),
    "rust": ("rs",),
    "scala": (),
    "sql": (),
    "swift": (),
    "typescript": ("ts",),
    "verilog": (),
}
"""Languages, and further names of theirs, as fences have them."""


@dataclass(frozen=True)
class RemoteProgram:
    language: str
    """As `LANGUAGES` has it, or as the model wrote it."""
    code: str
    stdin: str
    arguments: Mapping[str, Any]
    """All arguments of a call that has some."""


@dataclass(frozen=True)
class Stage:
    """How the compiler or the program ended."""

    output: str
    ending: str = ""
    """How it ended, in words for the model; empty if it ended well, or its output tells."""
    ok: bool = True
    timed_out: bool = False
    seconds: float = 0.0
    """Wall time."""


class RemoteCodeOptions(WithoutPolicy):
    """Where the service is, and what one program may use there."""

    url: str
    api_key: SecretStr | None = None
    """Bearer token, if the service wants one."""
    languages: tuple[str, ...] = Field(min_length=1)
    """In which it may be called by a tag, a fence or a name; the first one is that of a call which names none."""
    timeout_seconds: float = Field(default=10.0, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    """Wall time of one program."""
    compile_seconds: float = Field(default=10.0, gt=0)
    """Wall time of the compiler."""
    grace_seconds: float = Field(default=10.0, gt=0)
    """The service's answer must come so long after both."""
    queue_seconds: float = Field(default=60.0, gt=0)
    """A program that finds no place among `max_concurrent` within it is the fault ``overloaded``."""
    max_concurrent: int = Field(default=64, ge=1)
    """Requests under way at once, of each replica."""
    max_output_length: int = Field(default=4000, ge=100)
    """Characters of an observation; of a longer one the middle is left out."""
    max_memory_mb: int | None = Field(default=None, ge=1)
    """Memory of one program, megabytes of 2**20 bytes; None: the service's own limit."""


class RemoteCodeTool(Tool):
    """One service. A subclass says what it is asked and how its answers are read."""

    service_name: ClassVar[str]
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "the program; print what you want to see"},
            "language": {"type": "string", "description": "such as python, javascript or cpp"},
            "stdin": {"type": "string", "description": "what the program reads from standard input"},
        },
        "required": ["code"],
    }
    options: RemoteCodeOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        key = self.options.api_key
        self.service = CodeService(
            self.service_name,
            self.service_url(base_url(self.name, self.options.url)),
            key.get_secret_value() if key is not None else None,
            self.options.max_concurrent,
            self.options.queue_seconds,
        )

    @staticmethod
    @abstractmethod
    def service_url(url: str) -> str:
        """What stands before the paths of the service's routes."""

    @abstractmethod
    async def probe(self) -> None:
        """See that the service answers, and takes the limits of the options. Raises ToolFault or RefusedError."""

    @abstractmethod
    async def run_program(self, program: RemoteProgram) -> Sequence[Stage]:
        """Run it: the compiler's stage, if there was one, and that of the program. Raises as `Service.ask`, and
        InvalidCall with words for the model."""

    @property
    def call_names(self) -> tuple[str, ...]:
        names = [*super().call_names, *_GENERAL_NAMES]
        for language in self.options.languages:
            names += [language, *LANGUAGES.get(language, ())]
        if _PYTHON in self.options.languages:
            names += _PYTHON_NAMES
        return tuple(dict.fromkeys(names))

    async def start(self) -> None:
        try:
            await self.probe()
        except (ToolFault, ServiceRejectedError, TooLongError, InvalidCall) as error:
            await self.service.close()
            words = str(error) or "an answer that is too long"
            raise StartError(
                f"tool {self.name} cannot start: {words}. Start {self.service_name} there, or set the tool's options "
                f"with --tool_config (url is {self.service.url!r})"
            ) from error

    async def close(self) -> None:
        await self.service.close()

    def isolation_in_force(self) -> str:
        return f"that of {self.service_name} at {self.service.url}"

    def join(self, calls: Sequence[Call]) -> list[Call]:
        groups = (list(group) for _, group in groupby(calls, key=self._language))
        return [call for group in groups for call in joined(group)]

    async def run(self, call: Call, context: Context) -> ToolResult:
        program = self.program(call, context)
        try:
            stages = await self.run_program(program)
        except TooLongError:
            words = f"The program wrote more than the {MAX_ANSWER_BYTES >> 20} MB that an answer may have."
            return ToolResult(words, error=True, metrics={"error": 1.0, "timed_out": 0.0})
        except ServiceRejectedError as error:
            words = f"{self.service_name} at {self.service.url} refuses the request: {error}"
            raise ToolFault(FaultKind.BAD_REQUEST, words, retryable=False) from error
        return self._describe(stages)

    def program(self, call: Call, context: Context) -> RemoteProgram:
        """What a call asks for. Raises InvalidCall if it has no code."""
        return RemoteProgram(self._language(call), code_of(call), stdin_of(call, context), call.arguments or {})

    def seconds(self) -> float:
        """Deadline of a request that runs a program."""
        return self.options.compile_seconds + self.options.timeout_seconds + self.options.grace_seconds

    def _language(self, call: Call) -> str:
        named = (call.arguments or {}).get("language")
        if isinstance(named, str) and named.strip():
            return language_of(named.strip())
        if call.name in _PYTHON_NAMES:
            return _PYTHON
        if call.name in (*super().call_names, *_GENERAL_NAMES):
            return self.options.languages[0]
        return language_of(call.name)

    def _describe(self, stages: Sequence[Stage]) -> ToolResult:
        last_or_failed = [stage for stage in stages if stage is stages[-1] or not stage.ok]
        written = "\n".join(text for stage in last_or_failed if (text := stage.output.rstrip("\n")))
        ending = "\n".join(stage.ending for stage in last_or_failed if stage.ending)
        error = not all(stage.ok for stage in stages)
        metrics = {
            "wall_seconds": stages[-1].seconds,
            "timed_out": float(any(stage.timed_out for stage in stages)),
            "error": float(error),
        }
        parts = (cut_middle(written, self.options.max_output_length), ending)
        return ToolResult("\n".join(part for part in parts if part) or NO_OUTPUT, error=error, metrics=metrics)


def language_of(name: str) -> str:
    """The language that a fence, a tag or an argument names."""
    lower = name.lower()
    return next((known for known, names in LANGUAGES.items() if lower == known or lower in names), lower)


def not_served(language: str, served: Iterable[str]) -> InvalidCall:
    """What the model is told of a language that there is not."""
    return InvalidCall(f"the language {language[:40]!r} is not served here; known: {', '.join(sorted(served))}")


def ending_of(what: str, *, timed_out: bool, seconds: float, signal: str | None, code: int | None, told: bool) -> str:
    """How a stage, `COMPILATION` or `EXECUTION`, ended that did not end well. `told`: it has written why."""
    if timed_out:
        return f"{what} timed out: it ran longer than {seconds:g} seconds."
    if signal:
        return f"{what} was ended by signal {signal}."
    if what == COMPILATION:
        return f"{what} failed with exit code {code}." if code else ""
    return f"Exit code: {code}" if code and not told else ""
