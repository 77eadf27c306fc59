"""The file that MCP clients share: ``{"mcpServers": {NAME: {"command": …} or {"url": …}}}``, with some keys of our own.

``${NAME}``, ``${NAME:-default}`` and ``${env:NAME}`` in ``command``, ``args``, ``env``, ``cwd``, ``readable``, ``url``
and ``headers`` stand for variables of the environment, so that no secret need be in the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from verl_tool.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_VARIABLE = re.compile(r"\$\{(?:env:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_EXPANDED = ("command", "args", "env", "cwd", "readable", "url", "headers")
_TRANSPORTS = {"streamable-http": "http", "streamable_http": "http", "streamableHttp": "http", "streamableHTTP": "http"}
_ABOUT_PEOPLE = ("description", "autoApprove", "alwaysAllow")
"""Keys of other clients, about what they show and ask people: passed over."""


class McpServer(BaseModel):
    """One entry of ``mcpServers``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    """The program of a server over stdio."""
    args: tuple[str, ...] = Field(default=(), repr=False)
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Its whole environment, but for PATH, HOME and the like. Nothing else of ours reaches it."""
    cwd: str | None = None
    """Where the program starts."""
    type: Literal["stdio", "sse", "http"] | None = Field(
        default=None, validation_alias=AliasChoices("type", "transport")
    )
    """How it is reached; None: ``stdio`` with a ``command``, ``http`` (streamable) with a ``url``."""
    url: str | None = Field(default=None, repr=False)
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """HTTP headers of every request, such as a key."""
    disabled: bool = False

    stateful: bool = True
    """Whether each trajectory has a client of its own. False: one serves all, for servers that keep nothing."""
    sandbox: bool = True
    """False: the program runs outside the sandbox, with the rights of the tool server."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that the program may read in the sandbox, at their own paths."""
    tools: tuple[str, ...] | None = None
    """Names of the server's tools to offer; None: all."""
    timeout_seconds: PositiveFloat = 30.0
    """The longest that one call may take."""
    start_seconds: PositiveFloat = 30.0
    """The longest that it may take to start the program, to connect, and to list its tools."""
    max_sessions: PositiveInt = 64
    """Clients of it in one replica; a trajectory beyond is told to come later (``overloaded``)."""
    max_memory_mb: int = Field(default=1024, ge=64)
    """Memory of its program in the sandbox, megabytes of 2**20 bytes."""
    max_output_length: int = Field(default=8000, ge=100)
    """Characters of an observation; of a longer one the middle is left out."""

    @field_validator("type", mode="before")
    @classmethod
    def _one_name_a_transport(cls, value: object) -> object:
        return _TRANSPORTS.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_about_people(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {key: each for key, each in value.items() if key not in _ABOUT_PEOPLE}

    @model_validator(mode="after")
    def _of_one_kind(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either a command (stdio) or a url (http, sse)")
        if (self.type == "stdio") != (self.command is not None) and self.type is not None:
            raise ValueError(f"type {self.type!r} goes with a {'command' if self.type == 'stdio' else 'url'}")
        if self.url is not None:
            if urlsplit(self.url).scheme not in ("http", "https"):
                raise ValueError("url must begin with http:// or https://")
            wrong = [name for name in ("args", "env", "cwd", "readable") if getattr(self, name)]
        else:
            wrong = ["headers"] if self.headers else []
            wrong += ["readable"] if self.readable and not self.sandbox else []
        if wrong:
            raise ValueError(f"{wrong[0]} has no effect here; leave it out")
        return self

    @property
    def transport(self) -> str:
        """``stdio``, ``sse`` or ``http``."""
        return self.type or ("stdio" if self.command is not None else "http")


class McpConfig(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mcpServers: dict[str, McpServer]

    @field_validator("mcpServers")
    @classmethod
    def _names(cls, value: dict[str, McpServer]) -> dict[str, McpServer]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"a server's name is {name[:80]!r}; use up to 64 letters, digits, '_' and '-'")
        return value

    def enabled(self) -> dict[str, McpServer]:
        """The servers that are not disabled, by name."""
        return {name: server for name, server in self.mcpServers.items() if not server.disabled}

    @classmethod
    def from_file(cls, path: Path) -> McpConfig:
        """Read and check a JSON file. Raises ConfigError naming the key at fault and the known ones."""
        try:
            content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"MCP config {path} cannot be read: {error}") from error
        except ValueError as error:
            raise ConfigError(f"MCP config {path} is not JSON: {error}") from error
        return cls.parse(content, f"MCP config {path}")

    @classmethod
    def parse(cls, content: object, origin: str = "MCP config") -> McpConfig:
        """Check the content of such a file, variables expanded. Raises ConfigError."""
        try:
            return cls.model_validate(_expanded(content))
        except ValidationError as error:
            raise ConfigError(f"{origin}: {_explain(error)}") from None
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None


def _expanded(content: object) -> object:
    servers = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(servers, Mapping):
        raise ConfigError('give an object {"mcpServers": {NAME: {"command": …} or {"url": …}}}')
    return {**content, "mcpServers": {name: _of_server(server) for name, server in servers.items()}}


def _of_server(server: object) -> object:
    if not isinstance(server, Mapping):
        return server
    return {key: _with_variables(each) if key in _EXPANDED else each for key, each in server.items()}


def _with_variables(value: Any) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(_variable, value)
    if isinstance(value, list):
        return [_with_variables(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _with_variables(each) for key, each in value.items()}
    return value


def _variable(match: re.Match[str]) -> str:
    value = os.environ.get(match["name"], match["default"])
    if value is None:
        raise ConfigError(f"{match[0]}: there is no variable {match['name']}; set it, or write ${{{match['name']}:-…}}")
    return value


def _explain(error: ValidationError) -> str:
    """Without the value at fault, which may be a secret."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        model: type[BaseModel] = McpServer if len(problem["loc"]) > 1 else McpConfig
        return f"unknown key {where!r}; known here: {', '.join(sorted(model.model_fields))}"
    if problem["type"] == "tuple_type":
        return f'{where}: write a list of texts: ["…", "…"]'
    return f"{where or 'the content'}: {problem['msg'].removeprefix('Value error, ')}"
