"""Tools in this process, as the loop asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.protocol import StepRequest, StepResult, ToolDescription
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import Tool


class InProcessTools:
    """A server's tools without the server; an async context manager, within which they run."""

    def __init__(self, tools: Sequence[Tool], call_seconds: float | None = None) -> None:
        """`call_seconds`: the longest that one call may take; None: as on a server."""
        self._toolset = ToolSet(tools)
        self._call_seconds = call_seconds

    def describe(self) -> list[ToolDescription]:
        """The tools, as ``GET /tools`` tells of them."""
        return self._toolset.describe()

    async def __aenter__(self) -> InProcessTools:
        await self._toolset.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._toolset.close(grace_seconds=1.0)

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        """The answer to one action."""
        request = StepRequest(trajectory_id, action, step, finish, is_last_step, extra or {})
        return (await self._toolset.step([request], timeout_seconds=self._call_seconds))[0]
