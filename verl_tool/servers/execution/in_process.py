"""Run tools in this process, with the interface that the loop uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.protocol import StepRequest, StepResult, ToolDescription
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import Tool


class InProcessTools:
    """Runs a server's tools without the server. Use it as an async context manager."""

    def __init__(self, tools: Sequence[Tool], call_seconds: float | None = None) -> None:
        """`call_seconds` is the deadline of one call. It defaults to that of a server."""
        self._toolset = ToolSet(tools)
        self._call_seconds = call_seconds

    def describe(self) -> list[ToolDescription]:
        """Describe the tools as ``GET /tools`` does."""
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
        """Run one action and return the answer."""
        request = StepRequest(trajectory_id, action, step, finish, is_last_step, extra or {})
        return (await self._toolset.step([request], timeout_seconds=self._call_seconds))[0]
