"""What the tools that run code in a sandbox pool have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pydantic import AliasChoices, Field

from verl_tool.errors import SandboxError
from verl_tool.formats import Call
from verl_tool.sandbox import Level, SandboxPool
from verl_tool.servers.tools._programs import joined
from verl_tool.servers.tools.base import Tool, ToolOptions


class PoolOptions(ToolOptions):
    """Limits of what a tool runs, and the size of its pool."""

    timeout_seconds: float = Field(default=10.0, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    """Wall time of one call."""
    max_output_length: int = Field(default=4000, ge=100)
    """Characters of an observation; of a longer one the middle is left out."""
    max_memory_mb: int = Field(default=2048, ge=64)
    """Memory of one call's program, of all tests of one, or of a workspace; megabytes of 2**20 bytes."""
    isolation: str = Level.full.name
    """The lowest level of isolation with which the tool agrees to start."""
    workers: int | None = Field(default=None, ge=1)
    """Warm processes that programs are forked from; None: one a core. Containers have none."""


class PolicyOptions(PoolOptions):
    """Rules for programs too."""

    pre_import: tuple[str, ...] = ()
    """Modules or import statements, such as ``import numpy as np``, that every program finds done."""
    allowed_modules: tuple[str, ...] | None = None
    """Top-level modules that programs may import; None: every installed one."""
    restricted_functions: tuple[str, ...] = ()
    """Functions that programs may not call, such as ``eval`` or ``os.system``."""


class SandboxTool(Tool):
    """Has a pool, which is `sandbox`, while it is started."""

    async def check(self) -> None:
        await self._pool().check()

    def _pool(self) -> SandboxPool:
        """Raises SandboxError if the tool has not been started."""
        if self.sandbox is None:
            raise SandboxError(f"{self.name} has not been started", retryable=True)
        return self.sandbox


class ProgramTool(SandboxTool):
    """Has a pool of its own; texts that follow one another are one program."""

    async def start(self) -> None:
        pool = self._new_pool()
        await pool.start()
        self.sandbox = pool

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()

    def join(self, calls: Sequence[Call]) -> list[Call]:
        return joined(calls)

    @abstractmethod
    def _new_pool(self) -> SandboxPool:
        """The pool, not started."""
