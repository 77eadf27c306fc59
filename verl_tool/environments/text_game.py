"""Text games of other packages: TextArena, gem, SkyRL-Gym, TextWorld, and environments with gymnasium's interface.

    python -m verl_tool.servers.ray_serve --tool_type text_game --tool_config '{"tools": [{"name": "text_game",
        "python": "venvs/gem/bin/python", "environment": "gem:game:GuessTheNumber-v0-easy"}]}'

The package is in a Python environment of its own, whose interpreter is `python`. Each episode is a process there
(`verl_tool.environments.host`). A row says with which seed its episode begins:
``tools_kwargs.environment = {"seed": 7, "make": {"max_number": 5}}``.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, field_validator

from verl_tool.environments.environment_tool import Environment
from verl_tool.environments.host.host_client import (
    EpisodeExitedError,
    HostClient,
    HostEpisode,
    HostError,
    HostSettings,
)
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.scan import remove_thoughts
from verl_tool.protocol import FaultKind, Opening
from verl_tool.servers.tools.base import ToolOptions, ToolResult
from verl_tool.verification import ENVIRONMENT_STYLE

BOXED = "boxed"
MAX_SEED = 2**32 - 1
_ARGUMENTS = {"seed", "make", "environment"}


class TextGameOptions(ToolOptions):
    """Which environments are served, and their limits."""

    environment: str | tuple[str, ...] = ()
    """``gem:…``, ``textarena:…``, ``skyrl_gym:…``, ``textworld:FILE_OR_FOLDER``, ``gymnasium:…``, ``module:factory`` or
    ``file.py:factory``. Of several, a row names its own."""
    python: str = sys.executable
    """Interpreter that has the environments' package."""
    extract: str = ""
    r"""What of a turn is the action: empty, the whole turn; a name, what stands in that tag; ``boxed``, what stands in
    ``\boxed{}``; else a regular expression, whose first group counts. The last match in a turn is taken."""
    max_steps: int = Field(100, ge=1)
    """Actions after which an episode ends."""
    opponent: str | None = None
    """``file.py:function`` that plays the other player of a two-player game of TextArena: it gets the text that this
    player sees and a `random.Random`, and returns an action."""
    processes: int = Field(64, ge=1)
    """Episodes at once in each replica."""
    memory_mb: int = Field(1024, ge=16)
    """Address space of an episode beyond that of the imported package, megabytes of 2**20 bytes."""
    start_seconds: float = Field(120.0, gt=0)
    """Time to import the package."""
    begin_seconds: float = Field(60.0, gt=0)
    step_seconds: float = Field(30.0, gt=0)

    @field_validator("python")
    @classmethod
    def _has_interpreter(cls, value: str) -> str:
        if shutil.which(value) is None:
            raise ValueError("there is no such program; name the interpreter of the package's environment")
        return value

    @field_validator("extract")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        try:
            re.compile(pattern_of(value))
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        return value

    @property
    def environments(self) -> tuple[str, ...]:
        return (self.environment,) if isinstance(self.environment, str) else self.environment


def pattern_of(extract: str) -> str:
    """Return the regular expression of `TextGameOptions.extract`."""
    if extract == BOXED:
        return r"\\boxed\{([^{}]*)\}"
    if re.fullmatch(r"[A-Za-z_]\w*", extract):
        return rf"<{extract}>(.*?)</{extract}>".replace(".", r"[\s\S]")
    return extract


def describe_action(extract: str) -> str:
    """Tell the model how to write an action."""
    if extract == BOXED:
        return r"write it in \boxed{}"
    if re.fullmatch(r"[A-Za-z_]\w*", extract):
        return f"write it between <{extract}> and </{extract}>"
    return f"write it so that it matches {extract}"


class TextGame(Environment):
    """A text game, each turn of which is an action."""

    name = "text_game"
    description = "A text game of another package; each turn is a move."
    Options = TextGameOptions
    options: TextGameOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.max_live = self.options.processes  # type: ignore[misc]
        self._pattern = pattern_of(self.options.extract)
        self._starting = asyncio.Lock()
        self._host: HostClient | None = None

    async def start(self) -> None:
        await self._running_host()

    async def check_needs(self) -> None:
        host = self._make_host()
        await host.start()
        await host.close()

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()
            self._host = None

    def _make_host(self) -> HostClient:
        o = self.options
        if not o.environments:
            raise ConfigError("tool text_game: option environment is empty; name one, such as gem:game:Sudoku-v0-easy")
        return HostClient(HostSettings(o.python, o.environments, o.opponent, o.memory_mb, o.start_seconds))

    async def _running_host(self) -> HostClient:
        """Return the host, a new one in place of one that has exited. Raises HostError."""
        async with self._starting:
            if self._host is None or not self._host.alive:
                if self._host is not None:
                    await self._host.close()
                    self._host = None
                host = self._make_host()
                await host.start()
                self._host = host
            return self._host

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[GameSession, Opening]:
        request = {**self._read_arguments(arguments), "extract": self._pattern}
        try:
            host = await self._running_host()
            episode = await host.open(self.options.begin_seconds)
        except HostError as error:
            raise ToolFault(FaultKind.UNREACHABLE, str(error), retryable=False) from error
        session = GameSession(host, episode)
        try:
            answer = await self._ask(session, request, self.options.begin_seconds, FaultKind.UNREACHABLE)
            if "raised" in answer:
                message = f"{request['begin']} does not begin with {dict(arguments)!r:.200}: {answer['raised']}"
                raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)
        except BaseException:  # cancelled too: its process may hang
            await asyncio.shield(host.end(episode, gently=False))
            raise
        return session, Opening(messages=answer["messages"], every_turn=True)

    def _read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check a row's arguments. Raises ToolFault."""
        known, problem = self.options.environments, ""
        environment = arguments.get("environment", known[0] if len(known) == 1 else None)
        seed, make = arguments.get("seed"), arguments.get("make") or {}
        if unknown := sorted(set(arguments) - _ARGUMENTS):
            problem = f"has {', '.join(unknown)}; known: {', '.join(sorted(_ARGUMENTS))}"
        elif environment not in known:
            problem = f"names the environment {environment!r}; served: {', '.join(known)}"
        elif isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            problem = f"has the seed {seed!r}; write a whole number from 0 to {MAX_SEED}"
        elif not isinstance(make, Mapping):
            problem = f"has make={make!r:.80}; write an object"
        if problem:
            message = f"tools_kwargs.environment {problem}"
            raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)
        return {"begin": environment, "seed": seed, "make": dict(make)}

    async def step(self, session: GameSession, call: Call) -> ToolResult:
        action = remove_thoughts(call.input)
        answer = await self._ask(session, {"action": action}, self.options.step_seconds, FaultKind.STATE_LOST)
        if "failed" in answer:
            raise ToolFault(FaultKind.TOOL_CRASHED, answer["failed"], retryable=False)
        session.steps += 1
        late = session.steps >= self.options.max_steps
        if "raised" in answer or "unread" in answer:
            words = answer.get("raised") or f"No action was found; {describe_action(self.options.extract)}."
            return ToolResult(words, valid=False, done=late, truncated=late, invalid_reason=words, role="user")
        reward, done = answer["reward"], answer["done"]
        truncated = answer["truncated"] if done else late
        return ToolResult(answer["observation"], done=done or late, truncated=truncated, reward=reward, role="user")

    async def _ask(
        self, session: GameSession, request: Mapping[str, Any], seconds: float, lost: FaultKind
    ) -> dict[str, Any]:
        """Return the answer of an episode's process. Raises ToolFault: what the environment did to itself may be the
        action's doing, while `lost` is nobody's."""
        try:
            return await session.episode.ask(request, seconds)
        except TimeoutError as error:
            await session.host.end(session.episode, gently=False)
            raise ToolFault(FaultKind.TIMEOUT, str(error), retryable=False) from error
        except EpisodeExitedError as error:
            kind = FaultKind.TOOL_CRASHED if error.by_itself else lost
            raise ToolFault(kind, str(error), retryable=False) from error

    async def end(self, session: GameSession) -> None:
        await session.host.end(session.episode)


class GameSession:
    """A trajectory's episode."""

    def __init__(self, host: HostClient, episode: HostEpisode) -> None:
        self.host, self.episode = host, episode
        self.steps = 0


def read_rows(
    source: str,
    *,
    count: int = 1000,
    first_seed: int = 0,
    held_out: float = 0.1,
    make: Mapping[str, Any] | None = None,
    system: str | None = None,
    max_turns: int | None = None,
    data_source: str = TextGame.name,
) -> Iterator[dict[str, Any]]:
    """Yield verl's rows for the environment `source`, one a seed. The last seeds, a share of `held_out`, are the split
    ``test``. Raises ConfigError."""
    if not 0 <= held_out <= 1:
        raise ConfigError(f"held_out is {held_out}; write a share from 0 to 1")
    num_train = count - round(count * held_out)
    prompt = [] if system is None else [{"role": "system", "content": system}]
    for number in range(count):
        arguments = {
            "name": TextGame.name,
            "environment": source,
            "seed": first_seed + number,
            "make": dict(make or {}),
        }
        row = {
            "data_source": data_source,
            "prompt": prompt,
            "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": "{}"},
            "extra_info": {
                "split": "train" if number < num_train else "test",
                "index": number,
                "tools_kwargs": {"environment": arguments},
            },
        }
        yield row if max_turns is None else {**row, "max_turns": max_turns}
