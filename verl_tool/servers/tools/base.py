"""What a tool is. One file a tool, named as the tool.

A stateless tool needs a name, a description, an example and `run`:

    class Reverse(Tool):
        name = "reverse"
        description = "Reverses a text."
        example_actions = ("<reverse>abc</reverse>",)

        async def run(self, call, context):
            return ToolResult(call.input[::-1])

Options of a tool are fields of a pydantic model of its own: ``Options = ReverseOptions``, read as ``self.options``. So
are arguments with types: ``Arguments = ReverseArguments``, read as ``self.arguments(call)``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from verl_tool.content.parts import MediaPart, Part, as_parts
from verl_tool.errors import ConfigError, ToolFault, VerlToolError
from verl_tool.formats import ALL_FORMATS, BUILT_IN_MARKERS, Call, Format, Tag, TagFormat, format_by_name, guard
from verl_tool.formats.find import find_calls
from verl_tool.formats.json_call import decode
from verl_tool.formats.load import specs_of
from verl_tool.formats.scan import THOUGHTS
from verl_tool.formats.tags import CUSTOM_TAGS, NAME_TAGS, OwnTagFormat
from verl_tool.protocol import FaultKind, Opening, Role, ToolDescription
from verl_tool.servers.tools.typed.problems import describe_problems, errors_of
from verl_tool.util.slots import Pausable
from verl_tool.verification import EnvironmentVerification, Verdict, Verification

if TYPE_CHECKING:
    from verl_tool.sandbox import SandboxPool


class InvalidCall(VerlToolError):
    """What the model wrote is no call that this tool can run; it reads the message, and the call counts as invalid."""


class CallError(VerlToolError):
    """A typed function failed by the model's own doing: it reads the message, and the call counts as an error."""


@dataclass(frozen=True)
class ToolResult:
    """What one call gave."""

    text: str = ""
    """What the model reads, before the call's format renders it. Empty where `parts` says it."""
    valid: bool = True
    """False if the call could not be understood; an error in the model's code is valid."""
    done: bool = False
    """True ends the trajectory."""
    truncated: bool = False
    """Of an environment, with `done`: a limit ended the episode, as gymnasium's ``truncated`` says."""
    reward: float | None = None
    """A reward for this call, for the shaping term ``tool_reward``."""
    image: Any | None = None
    """A data URI beside the text, as verl-tool's tools give it; `parts` says where each image stands."""
    audio: Any | None = None
    """As `image`."""
    invalid_reason: str | None = None
    """Why `valid` is False, for records and logs; the model reads `text`."""
    error: bool = False
    """The call ran and failed by the model's own doing (an exception, a timeout of its code)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the call's record in the trajectory (`CallRecord.metrics`); the model does not see them."""
    parts: Sequence[str | Part] = ()
    """In place of `text`: texts, images and audios (`verl_tool.content.parts`) in the order the model sees them."""
    role: Role = "tool"
    """Who speaks. If all calls of a turn are answered by a ``user``, the model reads a user message."""

    def __post_init__(self) -> None:
        """Raises TypeError for what is no part, ValueError if there is a text, image or audio beside the parts."""
        if self.parts:
            if self.text or self.image is not None or self.audio is not None:
                raise ValueError("a result has parts and a text, image or audio besides; put those among the parts")
            object.__setattr__(self, "parts", tuple(as_parts(self.parts)))


@dataclass
class Context:
    """Who calls: this trajectory, this step."""

    trajectory_id: str
    step: int | None
    """Number of the turn, counted from 0; None if the client sends none."""
    state: Any
    """What `create_state` returned at this trajectory's first call of this tool; None for a stateless tool."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The request's extra fields for this trajectory; in training the row's ``tools_kwargs``."""
    is_last_step: bool = False
    """The model gets no further turn after this one."""
    deadline: float | None = None
    """When the action is stopped, on the clock of `time.monotonic`, seconds; None if it is not."""
    action: str = ""
    """The whole action, of which the call is a part."""


class ToolOptions(BaseModel):
    """What can be set for every tool. A tool with options of its own extends this model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str | None = None
    """In place of the tool's own description."""
    formats: tuple[str, ...] | None = None
    """Names of the formats in which it can be called (see `format_by_name`); all of them if None."""
    start_tag: str | None = None
    """With the next three: a format of one's own, such as ``<run>``, ``</run>``, ``<ran>``, ``</ran>``, which comes
    on top of `formats`."""
    end_tag: str | None = None
    output_start_tag: str | None = None
    output_end_tag: str | None = None

    @model_validator(mode="after")
    def _all_tags_or_none(self) -> ToolOptions:
        tags = (self.start_tag, self.end_tag, self.output_start_tag, self.output_end_tag)
        if any(tags) and not all(tags):
            raise ValueError("start_tag, end_tag, output_start_tag and output_end_tag go together; set all or none")
        return self


class Tool(ABC):
    """One tool in one server process: made once per replica, called by many trajectories at once.

    Raise `ToolFault` (or `SandboxError`) from `run` if infrastructure failed. Anything else that `run` raises is a bug
    of the tool: it becomes the fault ``tool_crashed`` of that one trajectory.
    """

    name: ClassVar[str]
    """As in ``--tool_type``; also the file's name and the name that JSON calls use."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Further names by which a model may call it: tags, fence languages, older tool names."""
    description: ClassVar[str]
    """What it does, in a sentence for the model."""
    Arguments: ClassVar[type[BaseModel] | None] = None
    """A model of a call's arguments, for `arguments` to read; `parameters` follows from it."""
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    """JSON schema of the arguments, for prompts and ``GET /tools``. Nothing is checked by it; see `Arguments`."""
    example_actions: ClassVar[tuple[str, ...]] = ()
    """Calls as a model writes them; the first tells which format a prompt teaches."""
    formats: tuple[Format, ...] = ALL_FORMATS
    """The formats in which it can be called. An instance has tags of its own names besides, such as ``<reverse>``."""
    stateful: ClassVar[bool] = False
    """Whether `create_state` gives a trajectory something of its own that must be there at its next call."""
    max_live: ClassVar[int | None] = None
    """Trajectories that may have a state at once in each replica; a further one gets the fault ``overloaded``, which is
    retried. None: as many as the server has trajectories."""
    ttl_seconds: ClassVar[float | None] = None
    """A trajectory that has a state and is idle for so long is ended, and what it calls later gets the fault
    ``state_lost``. At most the server's ``--state_ttl``, which holds if None."""
    is_environment: ClassVar[bool] = False
    """Whether trajectories begin in it (`verl_tool.environments.environment_tool.Environment`)."""
    has_workspace: ClassVar[bool] = False
    """Whether its state is a workspace, which takes files (`FILES_FIELD`) and which `verify` can look at."""
    verification_slots: asyncio.Semaphore | None = None
    """Bounds the verifiers that run at a time; None: no bound."""
    takes_media: ClassVar[tuple[type[MediaPart], ...]] = ()
    """`ImagePart`: its state begins with the images of the prompt (`IMAGES_FIELD`), and is told of those that tools
    show (`take_media`). It is made when images come, whichever tool is called. `AudioPart`: the same for audio
    (`AUDIOS_FIELD`)."""
    sandbox: SandboxPool | None = None
    """The pool in which this tool runs Python, set by `start`; the server lends it to ``POST /run_code``."""

    Options: ClassVar[type[ToolOptions]] = ToolOptions
    options: ToolOptions = ToolOptions()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.Arguments is not None and "parameters" not in vars(cls):
            cls.parameters = cls.Arguments.model_json_schema()

    def __init__(self, **options: object) -> None:
        """Raises ConfigError if an option is unknown, naming the known ones, or of a wrong type."""
        _reject_bad_limits(self)
        self.options = self.check_options(options)
        self.formats = _formats_of(self, self.options)

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> ToolOptions:
        """The options as this tool's own model. Raises ConfigError naming the option and the known ones."""
        try:
            return cls.Options.model_validate(options)
        except ValidationError as error:
            problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(sorted(cls.Options.model_fields))
            raise ConfigError(f"tool {cls.name} has no option {where!r}; known: {known}")
        option = f"option {where} is {problem['input']!r:.80}: " if where else ""
        raise ConfigError(f"tool {cls.name}: {option}{problem['msg'].removeprefix('Value error, ')}")

    def isolation_in_force(self) -> str:
        """How code of others is confined, in words; empty if the tool runs none. Known once it has started."""
        return "" if self.sandbox is None else self.sandbox.level.describe()

    async def start(self) -> None:  # noqa: B027 - most tools need none
        """Take what the tool needs (a sandbox pool, a connection). Raise with a clear message if it cannot serve."""

    async def check_needs(self) -> None:  # noqa: B027 - most tools need none
        """Raise a `VerlToolError` if what the tool needs beside itself (a service, an index) is not there. Called by a
        training before it starts anything; leave nothing open."""

    async def close(self) -> None:  # noqa: B027 - most tools need none
        """Give back what `start` took."""

    async def check(self) -> None:  # noqa: B027 - most tools need none
        """Raise a `VerlToolError` if the tool can no longer serve; called every few seconds, so be quick."""

    @property
    def state_group(self) -> str:
        """Tools of the same group share a trajectory's state; the first one that is called makes it."""
        return self.name

    def reject_alongside(self, other: Tool) -> None:  # noqa: B027 - most tools stand any other
        """Raise ConfigError if this one cannot be served together with `other`."""

    async def new_state(self, context: Context) -> Any:
        """As `create_state`, with all that is known of the first call."""
        return await self.create_state(context.trajectory_id, context.extra)

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> Any:
        """This trajectory's own state, made before its first call."""
        return None

    async def fork_state(self, state: Any) -> Any:
        """A copy of a trajectory's state, for a second trajectory that goes on from the same point (``POST /fork``).

        Neither may see what the other does from then on; `close_state` is called for both. No call of the trajectory
        runs meanwhile. The default raises ToolFault with the kind ``not_forkable``, as does a tool whose state cannot
        be copied at the moment: nothing is forked then.
        """
        raise ToolFault(
            FaultKind.NOT_FORKABLE,
            f"tool {self.name} cannot copy what it keeps for a trajectory; give it a method fork_state",
            retryable=False,
        )

    async def close_state(self, state: Any) -> None:  # noqa: B027 - most tools need none
        """Free it: the trajectory finished, expired, or the server stops."""

    def take_media(self, state: Any, media: Sequence[MediaPart]) -> None:  # noqa: B027 - only where `takes_media`
        """An observation holds these, all images or all audio, behind all earlier ones; its own are among them."""

    def pausable(self, state: Any) -> Sequence[Pausable]:
        """What a state has that must know that its verifier waits for a slot."""
        return ()

    async def verify(self, state: Any, verification: Verification) -> Verdict:
        """What a verifier says of a workspace. Raises ToolFault or SandboxError if it cannot be run."""
        raise NotImplementedError(f"tool {self.name} has no workspace")

    def opening(self, state: Any) -> Opening:
        """What an environment shows before the model's first turn."""
        raise NotImplementedError(f"tool {self.name} is no environment")

    async def judge(self, state: Any, text: str, verification: EnvironmentVerification) -> Verdict:
        """What an environment says at the end. `text`: what the model wrote last, if no call sent it. Raises
        ToolFault."""
        raise NotImplementedError(f"tool {self.name} is no environment")

    @property
    def call_names(self) -> tuple[str, ...]:
        """All names by which a model may call it; a tool whose options add some extends it."""
        return (self.name, *self.aliases)

    def recognise(self, action: str) -> list[Call]:
        """The calls in `action` that are for this tool, in order and without overlap.

        The default takes those that bear one of its names; of two that overlap, the first one, and of two that begin at
        the same place that of the format which stands first in `formats`.
        """
        return find_calls(action, self.formats, set(self.call_names))

    def join(self, calls: Sequence[Call]) -> list[Call]:
        """What to run for calls of this tool that follow one another in an action; the default is each by itself."""
        return list(calls)

    @classmethod
    def comparable(cls, observation: str) -> str:
        """An observation without what is another one at each run and says nothing, as a time or an address. Two are the
        same to ``python -m verl_tool.replay --reexecute`` if these are; the default leaves it as it is.
        """
        return observation

    def arguments(self, call: Call) -> Any:
        """The call's arguments as an `Arguments`, for use in `run`.

        Those of a JSON call; else the text, if it is a JSON object, or if the model has one field. Raises InvalidCall
        with words for the model if they do not fit: let it through.
        """
        model = type(self).Arguments
        if model is None:
            raise ConfigError(f"tool {self.name} reads arguments and has no Arguments; set it to a pydantic model")
        arguments = call.arguments if call.arguments is not None else _read(call.input, list(model.model_fields))
        try:
            return model.model_validate(arguments)
        except ValidationError as error:
            problems = describe_problems(errors_of(error))
        raise InvalidCall(f"wrong arguments for {self.name}({', '.join(model.model_fields)}): {problems}")

    @abstractmethod
    async def run(self, call: Call, context: Context) -> ToolResult:
        """Run one call. Many run at once; one trajectory's calls run one after the other."""

    def describe(self) -> ToolDescription:
        """What ``GET /tools`` tells."""
        bare = self._description("")
        return self._description(self._prompt_format().usage([bare]) if self.formats else "")

    def _prompt_format(self) -> Format:
        """The format to teach a model: that of the first example action."""
        for action in self.example_actions[:1]:
            for fmt in self.formats:
                if any(call.name in self.call_names for call in fmt.find_calls(action)):
                    return fmt
        return self.formats[0]

    def _description(self, usage: str) -> ToolDescription:
        return ToolDescription(
            name=self.name,
            description=self.options.description or self.description,
            parameters=dict(self.parameters),
            usage=usage,
            example_actions=list(self.example_actions),
            stateful=self.stateful,
            environment=self.is_environment,
            formats=[*dict.fromkeys(spec for fmt in self.formats for spec in specs_of(fmt))],
        )


def _reject_bad_limits(tool: Tool) -> None:
    for name in ("max_live", "ttl_seconds"):
        value = getattr(tool, name)
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ConfigError(f"tool {tool.name} has {name}={value!r}; it must be a number above 0, or None")


def _read(text: str, names: Sequence[str]) -> Mapping[str, Any]:
    """The arguments in a text. Raises InvalidCall."""
    try:
        value = decode(text)
    except ValueError:
        value = None
    if isinstance(value, dict) and (len(names) > 1 or set(value) == set(names)):
        return value
    if len(names) == 1:
        return {names[0]: text}
    raise InvalidCall(f"write the arguments as one JSON object with the names {', '.join(names)}")


def _formats_of(tool: Tool, options: ToolOptions) -> tuple[Format, ...]:
    """The formats of one instance. All their strings are claimed, so that no tool's output can imitate them."""
    if options.formats is not None:
        formats = tuple(format_by_name(name) for name in options.formats)
    elif tool.formats is ALL_FORMATS:
        formats = ALL_FORMATS + _name_tags(tool)
    else:
        formats = tool.formats
    return _custom_tags(tool, options) + formats


def _custom_tags(tool: Tool, options: ToolOptions) -> tuple[TagFormat, ...]:
    if not (options.start_tag and options.end_tag and options.output_start_tag and options.output_end_tag):
        return ()
    tag = Tag(tool.name, options.start_tag, options.end_tag)
    return (_claimed(tool, OwnTagFormat(CUSTOM_TAGS, [tag], (options.output_start_tag, options.output_end_tag))),)


def _name_tags(tool: Tool) -> tuple[TagFormat, ...]:
    """``<name>…</name>`` for each of its names that is not a tag of a built-in format, or of thoughts, already."""
    names = dict.fromkeys(tool.call_names)
    in_use = BUILT_IN_MARKERS | THOUGHTS.keys()
    tags = [Tag.named(name) for name in names if Tag.can_be(name) and f"<{name}>" not in in_use]
    return (_claimed(tool, OwnTagFormat(NAME_TAGS, tags)),) if tags else ()


def _claimed(tool: Tool, fmt: TagFormat) -> TagFormat:
    try:
        guard(fmt)
    except ValueError as error:
        raise ConfigError(f"tool {tool.name}: {error}") from error
    return fmt
