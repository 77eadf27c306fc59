"""What travels between a trajectory and the tool server.

`POST /get_observation` takes one list per field, all of the same length, one entry a trajectory. Two fields are
ours and may be left out by older clients: ``steps`` (a repeated step is answered from the record and runs nothing)
and, in the answer, ``faults`` (infrastructure failed: not something a model should learn from).

What a request may hold is bounded here. This module imports nothing else of the project but `json_text`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from verl_tool.util.json_text import encode_json, excerpt

MAX_ID_CHARACTERS = 256
"""Of a trajectory id, which is written into logs: printable characters only."""
MAX_ACTION_CHARACTERS = 1 << 20
"""Of one action. Of one that is too long for its calls to be looked for, a model is told; only more is a fault."""
MAX_STEP = 2**31 - 1
MAX_KNOWN_MEDIA = 256
"""Most images and audios that an entry may say to have already."""
MAX_FURTHER_FIELDS = 64
"""Most fields of a request that this page does not know."""


TOOL_FIELD = "tool_name"
"""Entry of a request's extra data that names the one tool that may take this trajectory's action."""
TOOLS_FIELD = "tool_names"
"""Entry of a request's extra data that lists the tools that may take it."""
DIRECT_FIELD = "direct_call"
"""Entry of a request's extra data: true if the action is one JSON call and nothing else, whatever formats the tool has;
its observation is the tool's text as it is. For programs: a model's text goes through the formats."""
FORMATS_FIELD = "call_formats"
"""Entry of a request's extra data that lists the formats in which calls are looked for, as `ToolDescription.formats`
names them; without it, all of the tools' formats."""
TURNS_LEFT_FIELD = "turns_left"
"""Entry of a request's extra data: turns that the model may still write behind the answer."""
FILES_FIELD = "workspace_files"
"""Entry of a request's extra data: files (`verl_tool.content.packed_files`) that are put into the trajectory's
workspace before anything runs in it. Sent with the first call; once there is a workspace, none are put into it."""
WORKSPACE_IMAGE_FIELD = "workspace_image"
"""Entry of a request's extra data: the container image of the trajectory's workspace. Sent with the first call."""
WORKSPACE_LIMITS_FIELD = "workspace_limits"
"""Entry of a request's extra data: CPUs, memory and network of that container
(`verl_tool.workspace_limits`). Sent with the first call."""
IMAGES_FIELD = "images"
"""Entry of a request's extra data: the images of the trajectory's prompt in their order, as data URIs. Sent with the
first call, whichever tool that calls."""
AUDIOS_FIELD = "audios"
"""As `IMAGES_FIELD`: recordings for the tools that cut them. No prompt holds audio; a row brings them for its tools."""
ENVIRONMENT_FIELD = "environment"
"""Entry of a request's extra data: the arguments of the environment in which the trajectory begins, and with several
environments its ``name``. Sent with the first call, whose action is empty; the answer has the `Opening`."""
SENT_ONCE = (
    FILES_FIELD,
    WORKSPACE_IMAGE_FIELD,
    WORKSPACE_LIMITS_FIELD,
    IMAGES_FIELD,
    AUDIOS_FIELD,
    ENVIRONMENT_FIELD,
)
"""Entries that go with the first call only."""
VERIFY_FIELD = "workspace_verification"
"""Entry of a request's extra data: a `verl_tool.verification.Verification`, which is run in the trajectory's workspace
in place of the action. The answer's reward is the verifier's."""
VERDICT_FIELD = "environment_verdict"
"""Entry of a request's extra data: a `verl_tool.verification.EnvironmentVerification`, which the trajectory's
environment judges in place of the action. The action is the model's last text, which no call sent."""
KEEP_FIELD = "keep_state"
"""Entry of a request's extra data: true if a call that ends the trajectory leaves its state, because a verification is
to follow. What finishes the trajectory frees it."""
ABORT_FIELD = "abort"
"""Key of the extra data of a request that finishes a trajectory: true stops what it runs."""


class FaultKind(str, Enum):
    """Why a tool call has no observation."""

    UNREACHABLE = "unreachable"
    """No connection to the server, or the connection broke before the answer."""
    OVERLOADED = "overloaded"
    """The server's queue is full (HTTP 503)."""
    QUEUED = "queued"
    """The step waits on the server for the start of a container or a verifier, and keeps its place: request its answer
    again."""
    TIMEOUT = "timeout"
    """The deadline of the call passed before the server answered."""
    STATE_LOST = "state_lost"
    """The replica that held this trajectory's state is gone, or the state expired."""
    SANDBOX = "sandbox"
    """The sandbox itself failed; the code that it was given is not to blame."""
    TOOL_CRASHED = "tool_crashed"
    """The tool's own program raised; a bug in the tool."""
    BAD_REQUEST = "bad_request"
    """The caller sent something that no retry will mend."""
    SHUTTING_DOWN = "shutting_down"
    """The server is stopping."""
    MISCONFIGURED = "misconfigured"
    """What the row brings for its tools, or an option of theirs names, is not there or not as it must be: a database,
    tests, the address of a service. No model can cause it."""
    NOT_FORKABLE = "not_forkable"
    """A tool cannot copy what it keeps for a trajectory. The answer to a fork only, never to a step."""

    @property
    def provokable(self) -> bool:
        """Whether what a model writes may bring it about: by a slow call, an input that a tool or the server's checks
        do not stand. A trajectory that a call of its own ended in such a way counts as it stands."""
        return self in (FaultKind.TIMEOUT, FaultKind.TOOL_CRASHED, FaultKind.BAD_REQUEST)


class Fault(BaseModel):
    """A failure of the infrastructure, for one trajectory of a request."""

    model_config = ConfigDict(frozen=True, use_enum_values=False)

    kind: FaultKind
    message: str
    """What was wrong, the limit, and what to do."""
    retryable: bool
    """Whether the same step may be sent again without running anything twice."""


class ToolDescription(BaseModel):
    """One tool as ``GET /tools`` tells it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, as in OpenAI's ``tools[].function.parameters``."""
    usage: str = ""
    """What to put into a system prompt so that a model can call it."""
    example_actions: list[str] = Field(default_factory=list)
    """Actions that this tool recognises, as a model would write them."""
    formats: list[str] = Field(default_factory=list)
    """The formats in which it can be called: names, and ``<name>`` for tags."""
    stateful: bool = False
    environment: bool = False
    """Whether trajectories begin in it (`ENVIRONMENT_FIELD`). No prompt describes it, since no model calls it."""


Role = Literal["tool", "user"]
"""Who speaks in an observation: a tool that was called, or a user."""


class Opening(BaseModel):
    """What an environment shows before the model's first turn."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    """Chat messages that follow those of the row."""
    tools: list[ToolDescription] = Field(default_factory=list)
    """Tools of this one trajectory, described in addition to those of the server."""
    every_turn: bool = False
    """Whether a turn without a call is an action too."""
    verdict_seconds: float = 0.0
    """How long the verdict may take, for callers to check their deadline."""


class Observation(BaseModel):
    """The long form of an observation; a plain string is the short form of ``Observation(obs=...)``.

    A detail that is not known here is passed over: other servers of this protocol send some of their own.
    """

    model_config = ConfigDict(extra="ignore")

    obs: str = ""
    reward: float | None = None
    """A reward for this one step, from the tool."""
    image: Any | None = None
    audio: Any | None = None
    invalid_reason: str | None = None
    """Why ``valid`` is false, for logs; the model reads ``obs``."""
    metrics: dict[str, float] | None = None
    role: Role | None = None
    """None: ``tool``."""
    opening: Opening | None = None
    """In the answer to `ENVIRONMENT_FIELD`."""


@dataclass(frozen=True)
class StepRequest:
    """One trajectory's part of a request."""

    trajectory_id: str
    action: str
    """The model's text of this turn, stop string included."""
    step: int | None = None
    """Number of the turn, counted from 0. With it, sending the same step twice runs it once."""
    finish: bool = False
    """Free this trajectory's state; the action is not run."""
    is_last_step: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """This trajectory's entry of ``extra_fields``, and of every further top-level list."""
    known_media: Sequence[str] = ()
    """Images and audios that the caller has already, by the SHA-256 of their files: the answer only names them."""
    begun: bool = False
    """The caller had an answer of this trajectory (`BEGUN_HEADER`): without state anywhere it is lost, and not new."""
    resent: bool = False
    """It was sent before and may have been run, without an answer (`BEGUN_HEADER`)."""


@dataclass(frozen=True)
class StepResult:
    """One trajectory's part of a response."""

    trajectory_id: str
    observation: str = ""
    """What the model reads. ``<image>`` and ``<audio>`` in it stand for what `image` and `audio` hold, in their order;
    `verl_tool.content.parts.parts_of` takes them together."""
    done: bool = False
    """The trajectory is over: it called `finish`, or the tool ended it."""
    valid: bool = True
    """A tool recognised the action."""
    fault: Fault | None = None
    reward: float | None = None
    image: Any | None = None
    """The observation's images: a list of `verl_tool.content.parts.ImagePart`. From a tool, or a server, of verl-tool's
    kind also one data URI; on the wire data URIs and references."""
    audio: Any | None = None
    """As `image`."""
    invalid_reason: str | None = None
    metrics: Mapping[str, float] | None = None
    role: Role | None = None
    """Whose message the observation is; None: a tool's."""
    opening: Opening | None = None
    """In the answer to `ENVIRONMENT_FIELD`: what the prompt shows."""


def request_body(requests: Sequence[StepRequest], extras: Sequence[object] | None = None) -> bytes:
    """The body of ``POST /get_observation`` for `requests`.

    A field that says nothing is left out, for servers that do not know it. `extras`: what to send in place of each
    entry's `StepRequest.extra`, such as its JSON.
    """
    columns: dict[str, object] = {
        "trajectory_ids": [request.trajectory_id for request in requests],
        "actions": [request.action for request in requests],
    }
    if any(request.step is not None for request in requests):
        columns["steps"] = [request.step for request in requests]
    if any(request.finish for request in requests):
        columns["finish"] = [request.finish for request in requests]
    if any(request.is_last_step for request in requests):
        columns["is_last_step"] = [request.is_last_step for request in requests]
    if any(request.known_media for request in requests):
        columns["known_media"] = [list(request.known_media) for request in requests]
    if any(request.extra for request in requests):
        columns["extra_fields"] = [dict(request.extra) for request in requests] if extras is None else list(extras)
    return encode_json(columns)


class ObservationRequest(BaseModel):
    """Body of ``POST /get_observation``.

    Every further top-level list must have one entry a trajectory too; it reaches the tool in ``StepRequest.extra``
    under its own name. Entries of a wrong type are kept here and answered one by one (`step_requests`), so that one
    bad entry does not cost the others.
    """

    model_config = ConfigDict(extra="allow")

    trajectory_ids: list[Any]
    actions: list[Any]
    extra_fields: list[Any] | None = None
    finish: list[Any] | None = None
    is_last_step: list[Any] | None = None
    steps: list[Any] | None = None
    known_media: list[Any] | None = None

    @model_validator(mode="after")
    def _one_entry_a_trajectory(self) -> ObservationRequest:
        expected = len(self.trajectory_ids)
        if len(self.model_extra or {}) > MAX_FURTHER_FIELDS:
            raise ValueError(
                f"the body has {len(self.model_extra or {})} fields beyond those of its own; send at most "
                f"{MAX_FURTHER_FIELDS}, or put the data into 'extra_fields'"
            )
        for name, value in self._columns():
            if value is None:
                continue
            if not isinstance(value, list):
                raise ValueError(
                    f"{name[:80]!r} is a {type(value).__name__}; every top-level field must be a list with one entry a "
                    f"trajectory ({expected} here). Put data of the whole request into each entry of 'extra_fields'"
                )
            if len(value) != expected:
                raise ValueError(
                    f"{name[:80]!r} has {len(value)} entries and 'trajectory_ids' has {expected}; "
                    "send one entry a trajectory"
                )
        return self

    def _columns(self) -> list[tuple[str, Any]]:
        own = ("actions", "extra_fields", "finish", "is_last_step", "steps", "known_media")
        return [(name, getattr(self, name)) for name in own] + list((self.model_extra or {}).items())

    def step_requests(self) -> list[StepRequest | Fault]:
        """The request's entries in order; an entry of a wrong type is the `Fault` to answer it with."""
        further = self.model_extra
        extra_columns = {name: column for name, column in further.items() if column is not None} if further else {}
        return [self._entry(i, extra_columns) for i in range(len(self.trajectory_ids))]

    def _entry(self, i: int, extra_columns: Mapping[str, list[Any]]) -> StepRequest | Fault:
        """Entry `i`, or what is wrong with it."""
        trajectory_id, action = self.trajectory_ids[i], self.actions[i]
        extra = self.extra_fields[i] if self.extra_fields is not None else None
        finish = self.finish[i] if self.finish is not None else None
        last = self.is_last_step[i] if self.is_last_step is not None else None
        step = self.steps[i] if self.steps is not None else None
        known = self.known_media[i] if self.known_media is not None else None
        well_formed = (
            is_trajectory_id(trajectory_id)
            and isinstance(action, str)
            and len(action) <= MAX_ACTION_CHARACTERS
            and (extra is None or isinstance(extra, dict))
            and (finish is None or isinstance(finish, bool))
            and (last is None or isinstance(last, bool))
            and (step is None or (type(step) is int and 0 <= step <= MAX_STEP))
            and (known is None or _are_hashes(known))
        )
        if not well_formed:
            return self._malformed(i, trajectory_id, action, extra, finish, last, step, known)
        merged = {name: column[i] for name, column in extra_columns.items()} | (extra or {})
        return StepRequest(trajectory_id, action, step, bool(finish), bool(last), merged, tuple(known or ()))

    @staticmethod
    def _malformed(
        i: int, trajectory_id: Any, action: Any, extra: Any, finish: Any, last: Any, step: Any, known: Any
    ) -> Fault:
        """The fault that names the first wrong value of entry `i`."""
        checks = (
            ("trajectory_ids", trajectory_id, is_trajectory_id(trajectory_id), A_TRAJECTORY_ID),
            ("actions", action, isinstance(action, str) and len(action) <= MAX_ACTION_CHARACTERS, _AN_ACTION),
            ("extra_fields", extra, extra is None or isinstance(extra, dict), "an object or null"),
            ("finish", finish, finish is None or isinstance(finish, bool), "true, false or null"),
            ("is_last_step", last, last is None or isinstance(last, bool), "true, false or null"),
            (
                "steps",
                step,
                step is None or (type(step) is int and 0 <= step <= MAX_STEP),
                f"a whole number from 0 to {MAX_STEP}, or null",
            ),
            ("known_media", known, False, _HASHES),
        )
        name, value, _, requested = next(check for check in checks if not check[2])
        message = f"{name}[{i}] is {excerpt(value)} ({type(value).__name__}); send {requested}"
        return Fault(kind=FaultKind.BAD_REQUEST, message=message, retryable=False)


A_TRAJECTORY_ID = f"a string of 1 to {MAX_ID_CHARACTERS} printable characters"
"""What `is_trajectory_id` asks for, in words."""
_AN_ACTION = f"a string of at most {MAX_ACTION_CHARACTERS} characters"
_HASHES = f"a list of at most {MAX_KNOWN_MEDIA} SHA-256 hashes of 64 hexadecimal digits, or null"


def is_trajectory_id(value: object) -> bool:
    """Whether `value` may name a trajectory."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARACTERS and value.isprintable()


def _are_hashes(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_KNOWN_MEDIA
        and all(isinstance(each, str) and len(each) == 64 for each in value)
    )


class ForkRequest(BaseModel):
    """Body of ``POST /fork``: a second trajectory is to have what the tools keep for a first one."""

    model_config = ConfigDict(extra="forbid")

    trajectory_id: str
    new_trajectory_id: str
    """An id that was never used: both go on from here, each with its own state."""

    @field_validator("trajectory_id", "new_trajectory_id")
    @classmethod
    def _may_name_a_trajectory(cls, value: str) -> str:
        if not is_trajectory_id(value):
            raise ValueError(f"send {A_TRAJECTORY_ID}")
        return value


class ForkResponse(BaseModel):
    """Answer of ``POST /fork``."""

    trajectory_id: str
    """The new trajectory's."""
    replica: str = ""
    """Id of the replica that holds both trajectories."""
    fault: Fault | None = None
    """Why there is no new trajectory."""


class ObservationResponse(BaseModel):
    """Answer of ``POST /get_observation``: one entry a trajectory, in the order of the request."""

    observations: list[str | Observation]
    dones: list[bool]
    valids: list[bool]
    faults: list[Fault | None] = Field(default_factory=list)
    processing_time_ms: float = 0.0

    def step_results(self, trajectory_ids: list[str]) -> list[StepResult]:
        """The entries as `StepResult`. A server that knows no ``faults`` gives none.

        Raises ValueError if the response has another number of entries than ``trajectory_ids``.
        """
        n = len(trajectory_ids)
        faults = self.faults or [None] * n
        for name, column in (("observations", self.observations), ("dones", self.dones), ("valids", self.valids)):
            if len(column) != n:
                raise ValueError(f"the server answered {len(column)} {name} for {n} trajectories")
        if len(faults) != n:
            raise ValueError(f"the server answered {len(faults)} faults for {n} trajectories")
        results = []
        for tid, obs, done, valid, fault in zip(
            trajectory_ids, self.observations, self.dones, self.valids, faults, strict=True
        ):
            long = Observation(obs=obs) if isinstance(obs, str) else obs
            results.append(
                StepResult(
                    tid,
                    long.obs,
                    done,
                    valid,
                    fault,
                    long.reward,
                    long.image,
                    long.audio,
                    long.invalid_reason,
                    long.metrics,
                    long.role,
                    long.opening,
                )
            )
        return results


REPLICA_HEADER = "x-verl-tool-replica"
"""Response header: id of the replica that took the request (not always the one that ran it). As a request header: the
replica that is meant; another one refuses the request with HTTP 421 and runs nothing."""
SERVER_HEADER = "x-verl-tool-server"
"""Response header: the server that answered, by a name that it has from one start to its end. As a request header: the
server that is meant; a replica of another one refuses the request with HTTP 421 and runs nothing."""
BEGUN_HEADER = "x-verl-tool-begun"
"""Request header. `STARTED`: the trajectories of this request have had answers of a replica that does not answer any
more. `RESENT`: the request was sent before and may have been run; as long as a replica that may know more is silent, it
is not run elsewhere."""
STARTED, RESENT = "1", "resent"
TRAJECTORY_HEADER = "x-verl-tool-trajectory"
"""Request header of ``POST /mcp``: the trajectory that a call belongs to."""
STEP_HEADER = "x-verl-tool-step"
"""Request header of ``POST /mcp``: the number of its step."""
MISDIRECTED = 421
"""HTTP status of such a refusal (RFC 9110, 15.5.20)."""


def proof_of(api_key: str, server: str) -> str:
    """What a direct server takes in place of `api_key`: it shows that the caller has the key, to `server` alone.

    Should another server listen there by now, it learns nothing that it could use.
    """
    return hmac.new(api_key.encode(), server.encode(), "sha256").hexdigest()


class ReplicaInfo(BaseModel):
    """One replica as ``GET /replicas`` tells it."""

    id: str
    url: str
    """Base URL of its direct server, such as ``http://127.0.0.1:40123``."""
    node: str = ""
    started: float = 0.0
    """Unix time, seconds."""


class ReplicaList(BaseModel):
    """Answer of ``GET /replicas``. An empty list: there is nobody but whoever answers at this address."""

    server: str = ""
    """Name of the server (`SERVER_HEADER`)."""
    replicas: list[ReplicaInfo] = []
    sticky: bool = False
    """Whether owners are remembered beyond the present list (stateful tools). Then the rendezvous owner is only a good
    guess for an older trajectory; the replica that is asked forwards if the guess was wrong."""


class HealthReport(BaseModel):
    """Answer of ``GET /health``. HTTP 200 if `status` is ``healthy``, else 503."""

    status: str
    """``healthy``, ``starting``, ``stopping`` or ``unhealthy``."""
    message: str = ""
    """What is wrong, if something is."""
    server: str = ""
    """Name of the server (`SERVER_HEADER`)."""
    replica: str = ""
    tools: list[str] = []
    running: int = 0
    """Entries being run."""
    queued: int = 0
    """Entries admitted and waiting for a place."""
    trajectories: int = 0
    """Live trajectories that are remembered."""
    replicas: list[HealthReport] = []
    """The peers' own reports, where a router gathers them."""
