"""What a tool is. One file a tool, named as the tool.

A stateless tool needs a name, a description, an example and `run`:

    class Reverse(Tool):
        name = "reverse"
        description = "Reverses a text."
        example_actions = ("<reverse>abc</reverse>",)

        async def run(self, call, context):
            return ToolResult(call.input[::-1])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from verl_tool.formats import ALL_FORMATS, Call, Format
from verl_tool.protocol import ToolDescription

if TYPE_CHECKING:
    from verl_tool.sandbox import SandboxPool


@dataclass(frozen=True)
class ToolResult:
    """What one call gave. `text` is what the model reads, before the call's format renders it."""

    text: str = ""
    valid: bool = True
    """False if the call could not be understood; an error in the model's code is valid."""
    done: bool = False
    """True ends the trajectory."""
    reward: float | None = None
    image: Any | None = None
    audio: Any | None = None
    invalid_reason: str | None = None
    error: bool = False
    """The call ran and failed by the model's own doing (an exception, a timeout of its code)."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Context:
    """Who calls: this trajectory, this step."""

    trajectory_id: str
    step: int | None
    state: Any
    """What `create_state` returned at this trajectory's first call of this tool; None for a stateless tool."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_last_step: bool = False


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
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    example_actions: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[tuple[Format, ...]] = ALL_FORMATS
    """The dialects in which it can be called."""
    stateful: ClassVar[bool] = False
    """Whether `create_state` gives a trajectory something of its own that must be there at its next call."""
    sandbox: SandboxPool | None = None
    """The pool in which this tool runs Python, set by `start`; the server lends it to ``POST /run_code``."""

    async def start(self) -> None:
        """Take what the tool needs (a sandbox pool, a connection). Raise with a clear message if it cannot serve."""

    async def close(self) -> None:
        """Give back what `start` took."""

    async def check(self) -> None:
        """Raise a `VerlToolError` if the tool can no longer serve; called every few seconds, so be quick."""

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> Any:
        """This trajectory's own state, made before its first call."""
        return None

    async def close_state(self, state: Any) -> None:
        """Free it: the trajectory finished, expired, or the server stops."""

    def recognise(self, action: str) -> list[Call]:
        """The calls in `action` that are for this tool. The default takes those that bear one of its names."""
        names = {self.name, *self.aliases}
        return [call for fmt in self.formats for call in fmt.find_calls(action) if call.name in names]

    @abstractmethod
    async def run(self, call: Call, context: Context) -> ToolResult:
        """Run one call. Many run at once; one trajectory's calls run one after the other."""

    def describe(self) -> ToolDescription:
        """What ``GET /tools`` tells."""
        usage = self.formats[0].usage([self._description("")]) if self.formats else ""
        return self._description(usage)

    def _description(self, usage: str) -> ToolDescription:
        return ToolDescription(
            name=self.name,
            description=self.description,
            parameters=dict(self.parameters),
            usage=usage,
            example_actions=list(self.example_actions),
            stateful=self.stateful,
        )
