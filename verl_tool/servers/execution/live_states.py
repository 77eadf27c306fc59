"""Track the trajectories with state of one tool, if the tool limits their number or their idle time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.execution.trajectory_table import ServedTrajectory
from verl_tool.servers.tools.base import Tool


class LiveStates:
    """Counts the states of the tools of one `Tool.state_group`, and finds those that are idle."""

    def __init__(self, tool: Tool, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._max_live, self.ttl_seconds = tool.name, tool.max_live, tool.ttl_seconds
        self._clock = clock
        self._live: OrderedDict[int, tuple[ServedTrajectory, float]] = OrderedDict()
        """Trajectories by identity, with the time of their latest call, the oldest first."""

    def __len__(self) -> int:
        return len(self._live)

    def take(self, trajectory: ServedTrajectory) -> None:
        """Add a trajectory. Raises ToolFault ``overloaded`` if the maximum number is reached."""
        if self._max_live is not None and len(self._live) >= self._max_live:
            message = f"tool {self._name} serves {self._max_live} trajectories at once (max_live); send it again later"
            raise ToolFault(FaultKind.OVERLOADED, message, retryable=True)
        self._live[id(trajectory)] = (trajectory, self._clock())

    def touch(self, trajectory: ServedTrajectory) -> None:
        """Record that a trajectory calls the tool now."""
        self._live[id(trajectory)] = (trajectory, self._clock())
        self._live.move_to_end(id(trajectory))

    def release(self, trajectory: ServedTrajectory) -> None:
        """Remove a trajectory whose state was closed."""
        self._live.pop(id(trajectory), None)

    def idle(self) -> list[ServedTrajectory]:
        """Return the trajectories that were idle for the time to live. Takes time proportional to their number."""
        found: list[ServedTrajectory] = []
        if self.ttl_seconds is None:
            return found
        oldest = self._clock() - self.ttl_seconds
        for trajectory, called in list(self._live.values()):
            if called > oldest:
                break
            if trajectory.users == 0 and not trajectory.closed and trajectory.last_used <= oldest:
                found.append(trajectory)
        return found
