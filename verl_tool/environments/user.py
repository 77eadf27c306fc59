"""A simulated user: a model, or a script of the row, who wants something and answers the policy's questions.

    python -m verl_tool.servers.ray_serve --tool_type user --tool_config tools.yaml

A row's ``tools_kwargs.environment`` has a `goal` and perhaps a `persona`, or a `script`. Turns without a call go to the
user; calls go to the functions of the domain (`verl_tool.environments.simulated_user.domain`) and to the server's other
tools. The conversation is graded by the database at its end and by what the policy told the user, as in tau-bench
(https://arxiv.org/abs/2406.12045).
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verl_tool.environments.environment_tool import Environment, EnvironmentState
from verl_tool.environments.simulated_user.conversation import SimulatedUser, SpokenMessage, readable, without_breaks
from verl_tool.environments.simulated_user.domain import Database, Domain, state_hash
from verl_tool.environments.simulated_user.model_user import ModelSampling, ModelUser, UserModel
from verl_tool.environments.simulated_user.output_match import contains_output
from verl_tool.environments.simulated_user.scripted_user import ScriptedUser, UserScript
from verl_tool.errors import ConfigError, StartError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind, Opening
from verl_tool.servers.tools._service import RemoteService, base_url
from verl_tool.servers.tools._web import WebOptions
from verl_tool.servers.tools.base import ToolResult
from verl_tool.verification import ENVIRONMENT_STYLE, Verdict

_M = TypeVar("_M", bound=BaseModel)
_STRICT = ConfigDict(extra="forbid", frozen=True)


class UserRow(BaseModel):
    """What a row says of its user: the entries of ``tools_kwargs.environment``."""

    model_config = _STRICT

    goal: str | None = None
    """What the user wants and knows. The policy never sees it."""
    persona: str = ""
    first: str | None = None
    """The user's first message; None: the model writes it."""
    script: UserScript | None = None
    """In place of a model."""
    database: Database | None = None
    """Initial data; None: those of the domain's file."""

    @model_validator(mode="after")
    def _has_one_user(self) -> UserRow:
        if (self.goal is None) == (self.script is None):
            raise ValueError("give a goal, for a model to play the user, or a script")
        return self


class GoldAction(BaseModel):
    """A call that a right trajectory makes."""

    model_config = _STRICT

    name: str
    arguments: dict[str, Any] = {}


class UserGroundTruth(BaseModel):
    """What a conversation is graded by; at least one of them. All must hold."""

    model_config = _STRICT

    outputs: list[str] = []
    """What the policy must have told the user, compared by `contains_output`: numbers by value, letter case ignored."""
    forbidden_outputs: list[str] = []
    """What it must not have told, such as all other answers that there are: else a policy that lists them all wins."""
    actions: list[GoldAction] | None = None
    """Calls that lead to the database as it must be at the end; an empty list: unchanged."""
    state: Database | str | None = None
    """Instead: that database, or its `state_hash`."""

    @model_validator(mode="after")
    def _says_something(self) -> UserGroundTruth:
        if self.actions is not None and self.state is not None:
            raise ValueError("give actions or state, not both")
        if not self.outputs and self.actions is None and self.state is None:
            raise ValueError("give outputs, actions or state; without them every conversation would be right")
        return self


class UserOptions(WebOptions):
    """The model, the domain, and limits of a conversation. `cache` stores the model's answers by their requests."""

    base_url: str | None = None
    """OpenAI-compatible endpoint, such as ``http://127.0.0.1:8000/v1``. Rows with a script need none."""
    model: str = "default"
    key_variable: str | None = None
    """Environment variable that has the API key, where the server is started."""
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = None
    max_tokens: int = Field(default=512, ge=1)
    """Of one answer of the user's."""
    max_turns: int = Field(default=20, ge=1)
    """Answers of a user. At the next turn the user leaves."""
    max_characters: int = Field(default=4000, ge=1)
    """Of a turn, as the user reads it; the rest is cut off."""
    stop: str = Field(default="###STOP###", min_length=1)
    """What the model writes to end the conversation."""
    timeout_seconds: float = Field(default=25.0, gt=0)
    """Of one request."""
    total_seconds: float = Field(default=30.0, gt=0)
    """Of an answer, with the wait for a place, and of its retries. Half of the loop's ``tool_call_timeout`` at most: a
    call that outlasts that one counts as the policy's doing."""
    domain: Path | None = None
    """File of typed functions over a database, which are tools of the policy."""


@dataclass
class UserSession:
    """One conversation, and its database."""

    user: SimulatedUser
    row: UserRow
    database: Database
    conversation: list[SpokenMessage] = field(default_factory=list)

    def fork(self) -> UserSession:
        """Return a session that goes on from here by itself."""
        return UserSession(self.user, self.row, copy.deepcopy(self.database), list(self.conversation))


class UserEnvironment(Environment):
    """Users of many conversations, and the domain that all of them are about."""

    name = "user"
    description = "A simulated user with a goal."
    Options = UserOptions
    options: UserOptions
    _model: UserModel | None = None
    _domain: Domain | None = None

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        if self.options.domain is not None:
            self._domain = Domain(self.options.domain)
        self._store = self.options.new_store()

    async def start(self) -> None:
        """Raises StartError if the key or the cache cannot be had, ConfigError if the address is none."""
        chosen = self.options
        if chosen.base_url is None:
            return
        key = os.environ.get(chosen.key_variable, "").strip() if chosen.key_variable else None
        if key == "":
            raise StartError(f"tool user: key_variable={chosen.key_variable} is not set where the server is started")
        address = base_url(self.name, chosen.base_url).removesuffix("/chat/completions")
        settings = "the options base_url and key_variable"
        service = RemoteService(
            "the user's model", address, key, chosen.max_concurrent, chosen.total_seconds, settings=settings
        )
        sampling = ModelSampling(chosen.model, chosen.temperature, chosen.max_tokens, chosen.seed)
        self._store.start()
        self._model = UserModel(
            service,
            self._store,
            sampling,
            stop=chosen.stop,
            request_seconds=chosen.timeout_seconds,
            total_seconds=chosen.total_seconds,
        )

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[UserSession, Opening]:
        row = _read(UserRow, arguments, "tools_kwargs.environment")
        if row.database is not None and self._domain is None:
            raise _misconfigured("the row has a database, and the server no domain; set the option domain")
        database = {} if self._domain is None else await self._domain.new_database(row.database)
        session = UserSession(self._user_of(row), row, database)
        first = await session.user.reply(())
        if first.ends or not first.text:
            raise _misconfigured("the user ends the conversation with the first message; see to the row's goal")
        session.conversation.append(SpokenMessage(True, first.text))
        tools = [] if self._domain is None else self._domain.tools
        return session, Opening(messages=[{"role": "user", "content": first.text}], tools=tools, every_turn=True)

    async def step(self, session: UserSession, call: Call) -> ToolResult:
        if call.name != self.name:
            assert self._domain is not None
            return await self._domain.call(session.database, call)
        turn = SpokenMessage(False, readable(call.input, self.options.max_characters))
        if sum(message.by_user for message in session.conversation) > self.options.max_turns:
            return ToolResult(done=True, truncated=True, role="user", metrics={"user_left": 1.0})
        reply = await session.user.reply([*session.conversation, turn])
        session.conversation += [turn, SpokenMessage(True, reply.text)]
        return ToolResult(reply.text, done=reply.ends, role="user")

    async def verdict(self, session: UserSession, text: str, data: Mapping[str, Any], rewards: list[float]) -> Verdict:
        """Return 1 if all that the ground truth names holds, else 0."""
        truth = _read(UserGroundTruth, data, "reward_model.ground_truth")
        heard = without_breaks("\n".join(message.text for message in session.conversation if not message.by_user))
        numbers = {"user_answers": float(sum(message.by_user for message in session.conversation) - 1)}
        if truth.outputs or truth.forbidden_outputs:
            right = all(contains_output(heard, without_breaks(output)) for output in truth.outputs)
            wrong = any(contains_output(heard, without_breaks(output)) for output in truth.forbidden_outputs)
            numbers["outputs_right"] = float(right and not wrong)
        if truth.actions is not None or truth.state is not None:
            expected = await self._expected_hash(session, truth)
            numbers["state_right"] = float(await asyncio.to_thread(_has_hash, session.database, expected))
        return Verdict(min(numbers.get("outputs_right", 1.0), numbers.get("state_right", 1.0)), numbers=numbers)

    async def fork_state(self, state: EnvironmentState) -> EnvironmentState:
        copied = copy.copy(state)
        copied.session, copied.rewards = state.session.fork(), list(state.rewards)
        return copied

    def _user_of(self, row: UserRow) -> SimulatedUser:
        if row.script is not None:
            return ScriptedUser(row.script)
        if self._model is None:
            raise _misconfigured("a model plays the row's user; set the option base_url, or give the row a script")
        assert row.goal is not None
        return ModelUser(self._model, row.persona, row.goal, row.first)

    async def _expected_hash(self, session: UserSession, truth: UserGroundTruth) -> str:
        if self._domain is None:
            raise _misconfigured("the ground truth has actions or a state, and the server no domain; set domain")
        if isinstance(truth.state, str):
            return truth.state
        if truth.state is not None:
            return state_hash(truth.state)
        database = await self._domain.new_database(session.row.database)
        await self._domain.replay(database, [(action.name, action.arguments) for action in truth.actions or ()])
        return state_hash(database)


def read_rows(source: str, *, data_source: str = "user") -> Iterator[dict[str, Any]]:
    """Yield verl's rows of a file of JSON lines.

    A line has `environment` (a `UserRow`), `ground_truth` (a `UserGroundTruth`) and perhaps `system`, the policy's
    system message. Raises ConfigError that names the line.
    """
    try:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    for number, line in enumerate(lines):
        try:
            task = json.loads(line)
            _read(UserRow, task["environment"], "environment")
            _read(UserGroundTruth, task["ground_truth"], "ground_truth")
        except (ValueError, KeyError, TypeError, AttributeError, ToolFault) as error:
            raise ConfigError(f"{source}, line {number + 1}: {type(error).__name__}: {error}") from error
        yield {
            "data_source": data_source,
            "prompt": [{"role": "system", "content": task["system"]}] if task.get("system") else [],
            "ability": "dialogue",
            "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": task["ground_truth"]},
            "extra_info": {"index": number, "tools_kwargs": {"environment": {"name": "user", **task["environment"]}}},
            "agent_name": "verltool_agent",
            "use_tool": True,
        }


def _read(model: type[_M], data: Mapping[str, Any], where: str) -> _M:
    """Raises ToolFault that names the entry."""
    try:
        # Parquet fills in what other rows have.
        return model.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
    at = ".".join([where, *map(str, problem["loc"])])
    raise _misconfigured(f"{at}: {problem['msg'].removeprefix('Value error, ')}")


def _misconfigured(words: str) -> ToolFault:
    return ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)


def _has_hash(database: Mapping[str, Any], expected: str) -> bool:
    """Whether the database has this hash. A call can leave in it what is not JSON, such as an infinite number."""
    try:
        return state_hash(database) == expected
    except ToolFault:
        return False
