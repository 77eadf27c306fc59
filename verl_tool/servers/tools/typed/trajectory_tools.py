"""Several typed tools that share what they keep for a trajectory.

class Cart(TrajectoryTools):
    max_live = 500

    async def setup(self, trajectory):
        self.items = []

    @tool
    async def add(self, item: str, count: int = 1) -> str:
        \"\"\"Put an item into the cart.\"\"\"
        self.items += [item] * count
        return f"{len(self.items)} items"
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, ClassVar

from verl_tool.content.parts import MediaPart
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools.base import Context, ToolOptions, ToolResult
from verl_tool.servers.tools.typed.function_tool import Function, FunctionTool, Mark, mark_of, tool_type
from verl_tool.servers.tools.typed.signature import read_signature

log = logging.getLogger(__name__)

TEARDOWN_SECONDS = 60.0
"""Longest that `TrajectoryTools.teardown` may take after a `setup` that failed."""


class TrajectoryTools:
    """Tools of one trajectory: each method that `tool` decorates is one, and all share the instance.

    One instance is made for a trajectory at its first call of one of the tools, and its calls run one after the other.
    It stays on one replica. A trajectory whose instance is gone gets the fault ``state_lost``, never a new instance.
    """

    max_live: ClassVar[int | None] = None
    """Instances at once in each replica; the first call of a further trajectory gets the fault ``overloaded``, which is
    retried. None: as many as the server has trajectories."""
    ttl_seconds: ClassVar[float | None] = None
    """The instance of a trajectory that is idle for so long is torn down. At most the server's
    ``--state_ttl``, which holds if None."""
    takes_media: ClassVar[tuple[type[MediaPart], ...]] = ()
    """`ImagePart`: the instance is made when the prompt has images, with `IMAGES_FIELD` in the ``extra`` of its
    `setup`, and is told of the images that tools show (`take_media`). `AudioPart`: the same for audio
    (`AUDIOS_FIELD`)."""
    Options: ClassVar[type[ToolOptions]] = ToolOptions
    options: ToolOptions = ToolOptions()
    """Set before `setup`, and before each call to those of the tool that is called."""

    @classmethod
    def shared(cls) -> type[TrajectoryTools]:
        """The class whose instance the methods work on. Classes that name the same one, which they extend, share a
        trajectory's instance; their methods use nothing that it does not have."""
        return cls

    async def setup(self, trajectory: Context) -> None:
        """Take what the trajectory needs. `trajectory` is the context of its first call: its id, ``extra`` and so on.

        What it raises is the fault ``tool_crashed``, unless it is a `ToolFault`; `teardown` is called then too.
        """

    async def fork(self) -> TrajectoryTools:
        """A copy of the instance for another trajectory, which goes on from the same point (``POST /fork``).

        Neither may see what the other does from then on. The copy is not set up, and torn down as any other. With data
        only: ``return copy.deepcopy(self)``. The default raises ToolFault with the kind ``not_forkable``.
        """
        raise ToolFault(
            FaultKind.NOT_FORKABLE,
            f"the tools of {type(self).__name__} cannot copy what they keep for a trajectory; give it a method fork",
            retryable=False,
        )

    def take_media(self, media: Sequence[MediaPart]) -> None:
        """An observation holds these, all images or all audio, behind all earlier ones; its own are among them."""

    async def teardown(self) -> None:
        """Give back what `setup` took: the trajectory finished or expired, or the server stops."""


class _Held:
    def __init__(self, instance: TrajectoryTools) -> None:
        self.instance = instance
        self.thread: asyncio.Future[Any] | None = None
        """The latest of its methods that runs in a thread, maybe longer than anybody waited for it."""

    def begin(self, thread: asyncio.Future[Any]) -> None:
        self.thread = thread

    async def idle(self) -> None:
        """Wait until no thread works on it."""
        if self.thread is not None and not self.thread.done():
            await asyncio.wait([self.thread])


class MethodTool(FunctionTool):
    """A tool that is a method of a `TrajectoryTools`. `method_tools` makes a subclass for each."""

    owner: ClassVar[type[TrajectoryTools]]
    stateful = True

    @property
    def state_group(self) -> str:
        return f"{self.owner.__module__}.{self.owner.__qualname__}"

    async def new_state(self, context: Context) -> _Held:
        held = _Held(self.owner())
        held.instance.options = self.options
        try:
            await self._on(held, partial(held.instance.setup, context))
        except BaseException:
            # Cancelled too: it may have taken something by then.
            await self._tear_down_failed(held, context)
            raise
        return held

    async def fork_state(self, state: _Held) -> _Held:
        copy = await self._on(state, state.instance.fork)
        if not isinstance(copy, self.owner) or copy is state.instance:
            name = self.owner.__name__
            raise TypeError(f"{name}.fork returned {copy!r:.80}; it must return another {name}")
        copy.options = self.options
        return _Held(copy)

    def take_media(self, state: _Held, media: Sequence[MediaPart]) -> None:
        state.instance.take_media(media)

    async def close_state(self, state: _Held) -> None:
        await self._on(state, state.instance.teardown)

    async def run(self, call: Call, context: Context) -> ToolResult:
        held: _Held = context.state
        held.instance.options = self.options
        function = partial(self.function, held.instance, **await self.keyword_arguments(call, context))
        return await self.answer(self._on(held, function))

    async def _on(self, held: _Held, function: Callable[[], object]) -> object:
        await held.idle()
        return await self.called(function, held.begin)

    async def _tear_down_failed(self, held: _Held, context: Context) -> None:
        try:
            await asyncio.wait_for(self.close_state(held), TEARDOWN_SECONDS)
        except Exception:
            # Anybody's code, and half set up.
            log.exception("tool %s failed to tear down for trajectory %s", self.name, context.trajectory_id)


@cache
def method_tools(owner: type[TrajectoryTools]) -> tuple[type[FunctionTool], ...]:
    """The tools that its methods are, in their order. Raises ConfigError if it has none, or one cannot be a tool."""
    _reject_uncallable(owner)
    _reject_shared_values(owner)
    marked = list(_marked_methods(owner))
    if not marked:
        raise ConfigError(f"{owner.__name__} has no tool; decorate a method with @tool")
    return tuple(_method_tool(owner, function, mark) for function, mark in marked)


def _marked_methods(owner: type[TrajectoryTools]) -> Iterator[tuple[Function, Mark]]:
    names = dict.fromkeys(name for kind in reversed(owner.__mro__) for name in vars(kind))
    for name in names:
        function = inspect.getattr_static(owner, name, None)
        if isinstance(function, (staticmethod, classmethod)) and mark_of(function.__func__):
            raise ConfigError(f"{owner.__name__}.{name} is a tool without an instance; write it as a method with self")
        mark = mark_of(function)
        if function is not None and mark is not None:
            yield function, mark


def _method_tool(owner: type[TrajectoryTools], function: Function, mark: Mark) -> type[FunctionTool]:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.annotation is not first.empty:
        raise ConfigError(f"{owner.__name__}.{function.__name__} is a method; write self before its arguments")
    signature = read_signature(function, mark.name, method=True)
    if signature.options is not None:
        raise ConfigError(
            f"tool {mark.name} takes its options as {signature.options!r}; set {owner.__name__}.Options and read "
            "self.options, which all its tools share"
        )
    return tool_type(
        MethodTool,
        function,
        signature,
        mark,
        owner=owner.shared(),
        takes_media=owner.takes_media,
        Options=owner.Options,
        max_live=owner.max_live,
        ttl_seconds=owner.ttl_seconds,
    )


def _reject_uncallable(owner: type[TrajectoryTools]) -> None:
    signatures = {"__init__": ((), "self"), "setup": ((None,), "self, trajectory"), "fork": ((), "self")}
    signatures |= {"teardown": ((), "self")}
    for name, (arguments, written) in signatures.items():
        try:
            inspect.signature(getattr(owner, name)).bind(None, *arguments)
        except TypeError as error:
            raise ConfigError(
                f"{owner.__name__}.{name} cannot be called: {error}; write it as {name}({written})"
            ) from error


def _reject_shared_values(owner: type[TrajectoryTools]) -> None:
    """A list in the class's body is one list for all trajectories."""
    for name, value in list(vars(owner).items()):
        constant = name.isupper() or name.startswith("__") or "ClassVar" in str(owner.__annotations__.get(name, ""))
        if isinstance(value, (list, dict, set)) and not constant:
            raise ConfigError(
                f"{owner.__name__}.{name} is a {type(value).__name__} that all trajectories would share; make it in "
                "setup, or, if nothing changes it, name it in capitals"
            )
