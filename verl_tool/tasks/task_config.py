"""The file ``task.toml`` in Harbor's layout, up to its schema version 1.4 (Harbor 0.26).

Harbor itself ignores keys that it does not know. Here an unknown key is an error, and so is a known one that would
change what the task means and is not followed: `unsupported_keys` names each with the reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.egress import EgressProxy, narrow_hosts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = "task.toml"
SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_HOST_VARIABLE = re.compile(r"\$\{[^}:]+\}")
_WITH_DEFAULT = re.compile(r"\$\{[^}:]+:-(.*)\}", re.DOTALL)
_SIZE = re.compile(r"\s*([0-9.]+)\s*([GMK])\s*", re.IGNORECASE)
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _parse_megabytes(value: object) -> object:
    """Convert a size such as ``2G``."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("give a size such as '2G' or '512M'")
    return int(float(match[1]) * _MEGABYTES[match[2].upper()])


def _take_default(value: str) -> str:
    """Return what stands for a variable of the host that is not set, as none is here."""
    match = _WITH_DEFAULT.fullmatch(value)
    return value if match is None else match[1]


def _to_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seconds = Annotated[float, Field(gt=0)]
NetworkMode = Literal["no-network", "public", "allowlist"]
Variables = dict[str, Annotated[str, AfterValidator(_take_default)]]
Megabytes = Annotated[int, Field(gt=0), BeforeValidator(_to_integer)]
Size = Annotated[Megabytes, BeforeValidator(_parse_megabytes)]
User = str | int
ROOT = ("root", "0", 0)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _PhaseTable(_Table):
    timeout_sec: Seconds | None = None
    user: User | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class AgentTable(_PhaseTable):
    """``[agent]``"""


class VerifierTable(_PhaseTable):
    """``[verifier]``"""

    env: Variables = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class SolutionTable(_Table):
    """``[solution]``"""

    env: Variables = {}


class EnvironmentTable(_Table):
    """``[environment]``"""

    build_timeout_sec: Seconds = 600.0
    docker_image: Annotated[str, Field(min_length=1)] | None = None
    os: str = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    memory: Size | None = None
    """The older form of ``memory_mb``."""
    storage: Size | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: Annotated[str, Field(pattern="^/")] | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    """The older form of ``network_mode``."""

    @model_validator(mode="after")
    def _has_one_size(self) -> EnvironmentTable:
        for name in ("memory", "storage"):
            old, new = getattr(self, name), getattr(self, f"{name}_mb")
            if old is not None and new is not None and old != new:
                raise ValueError(f"{name} is {old} MB, and {name}_mb is {new}; give one of them")
        return self


class TaskConfig(_Table):
    """The whole file."""

    version: str | None = None
    """The older form of ``schema_version``."""
    schema_version: str | None = None
    source: str | None = None
    task: dict[str, Any] = {}
    """Name, version and authors of the package, which change nothing of the task."""
    metadata: dict[str, Any] = {}
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    solution: SolutionTable = SolutionTable()
    environment: EnvironmentTable = EnvironmentTable()
    steps: list[Any] = []
    multi_step_reward_strategy: str | None = None
    artifacts: list[Any] = []
    """Files that Harbor stores beside a result. They change no reward, and are not collected."""


def parse_config(text: str, *, any_network: bool = False) -> TaskConfig:
    """Parse ``task.toml``.

    Args:
        text: content of the file.
        any_network: accept tasks that request a network.

    Raises ConfigError with everything that is wrong or not supported.
    """
    try:
        config = TaskConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{CONFIG} is no TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError("; ".join(f"{CONFIG}: {problem}" for problem in _describe(error))) from None
    problems = list(unsupported_keys(config, any_network))
    if problems:
        raise ConfigError("; ".join(f"{CONFIG}: {problem}" for problem in problems))
    return config


def unsupported_keys(config: TaskConfig, any_network: bool) -> Iterator[str]:
    """Yield what of a task is not supported here, and why."""
    version = config.schema_version or config.version or SCHEMA_VERSIONS[0]
    if version not in SCHEMA_VERSIONS:
        yield f"schema_version {version!r} is unknown; known: {', '.join(SCHEMA_VERSIONS)}"
    if config.steps or config.multi_step_reward_strategy:
        yield "steps: a task has one instruction and one verifier here, and no steps"
    yield from _unsupported_environment(config.environment)
    yield from _unsupported_verifier(config)
    for name, env in (
        ("environment.env", config.environment.env),
        ("verifier.env", config.verifier.env),
        ("solution.env", config.solution.env),
    ):
        for key, value in env.items():
            if _HOST_VARIABLE.fullmatch(value):
                yield f"{name}.{key} takes a variable of the host, and none goes into the sandbox"
    if not any_network:
        yield from _requested_networks(config)


def _unsupported_environment(environment: EnvironmentTable) -> Iterator[str]:
    if environment.os.lower() != "linux":
        yield f"environment.os {environment.os!r} is not supported; tasks run on linux"
    if environment.gpus or environment.tpu:
        yield "environment.gpus and environment.tpu are not supported; sandboxes have no accelerator"
    if environment.mcp_servers:
        yield (
            "environment.mcp_servers is not supported: the model's tools are those of the tool server; serve them by "
            "its tool type mcp, and remove the key"
        )
    if environment.skills_dir:
        yield "environment.skills_dir is not supported: it configures agent programs, and the model has none"
    if environment.healthcheck:
        yield "environment.healthcheck is not supported: no service is started in the sandbox that could become ready"
    for key, value in environment.env.items():
        if "\n" in value:
            yield f"environment.env.{key} has more than one line, which cannot be written to an image"


def _unsupported_verifier(config: TaskConfig) -> Iterator[str]:
    verifier = config.verifier
    if verifier.environment_mode == "separate" or verifier.environment is not None:
        yield (
            "verifier.environment and environment_mode 'separate' are not supported: the verifier runs in a second "
            "sandbox of the same image, with a copy of the whole workspace"
        )
    if verifier.collect:
        yield "verifier.collect is not supported: no command runs between the trajectory and its verifier"
    if verifier.user not in (None, *ROOT, config.agent.user):
        yield (
            f"agent.user is {config.agent.user!r} and verifier.user {verifier.user!r}; the verifier runs as the same "
            "user, or as root"
        )


def requested_hosts(phase: AgentTable | VerifierTable, config: TaskConfig) -> tuple[str, ...]:
    """Return the hosts that an agent or a verifier reaches in Harbor: patterns, ``*`` for all, which is the default,
    and none without a network. Raises ConfigError for hosts that no task reaches here."""
    table = config.environment if phase.network_mode is None else phase
    legacy = "no-network" if config.environment.allow_internet is False else "public"
    mode = table.network_mode or ("allowlist" if table.allowed_hosts else legacy)
    if mode != "allowlist":
        return ("*",) if mode == "public" else ()
    hosts = [f"[{host}]" if host.count(":") > 1 and "/" not in host else host for host in table.allowed_hosts or ()]
    try:
        EgressProxy(hosts)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG}: {error}") from None
    try:
        return narrow_hosts(("*",), hosts)
    except ConfigError:
        words = "a port, or an address that is not public; a task reaches public hosts at the ports 80 and 443"
        raise ConfigError(f"{CONFIG}: allowed_hosts {hosts!r:.200} has {words}") from None


def _requested_networks(config: TaskConfig) -> Iterator[str]:
    why = "and there is no network; run the task without one by --offline, or with it in a container by --network"
    tables: list[tuple[str, EnvironmentTable | AgentTable | VerifierTable]]
    tables = [("environment", config.environment), ("agent", config.agent), ("verifier", config.verifier)]
    for name, table in tables:
        if table.network_mode not in (None, "no-network"):
            yield f"{name}.network_mode is {table.network_mode!r}, {why}"
        elif table.allowed_hosts:
            yield f"{name}.allowed_hosts is {table.allowed_hosts!r:.80}, {why}"
    if config.environment.allow_internet and config.environment.network_mode is None:
        yield f"environment.allow_internet is true, {why}"


def _describe(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        at = ".".join(map(str, problem["loc"]))
        table = _table_at(problem["loc"][:-1])
        if problem["type"] == "extra_forbidden":
            known = f"; known: {', '.join(table.model_fields)}" if table else ""
            yield f"{at} is not supported here{known}"
        elif problem["type"] == "model_type":
            yield f"{at} must be a table, as [{at}]"
        else:
            yield f"{at or 'it'} is {problem['input']!r:.80}: {problem['msg'].removeprefix('Value error, ')}"


def _table_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    table: type[BaseModel] | None = TaskConfig
    for name in location:
        field = table.model_fields.get(str(name)) if table else None
        table = field.annotation if field and isinstance(field.annotation, type) else None
    return table
