"""Sandbox pools that several tools of one server use together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from verl_tool.sandbox import Level, Policy, SandboxPool, SessionLimits


@dataclass(frozen=True)
class PoolSettings:
    """What tools must have in common to share a pool, and so the workspaces in it."""

    workers: int | None
    warm_modules: tuple[str, ...]
    max_sessions: int
    policy: Policy
    level: Level
    limits: SessionLimits


class _Shared:
    """A pool, and how many tools use it."""

    def __init__(self, settings: PoolSettings) -> None:
        self.pool = SandboxPool(
            workers=settings.workers,
            warm_modules=settings.warm_modules,
            limits=settings.limits,
            policy=settings.policy,
            required_level=settings.level,
            max_sessions=settings.max_sessions,
            for_sessions=True,
        )
        self.started = asyncio.Lock()
        self.users = 0


_Key = tuple[asyncio.AbstractEventLoop, PoolSettings]
_shared: dict[_Key, _Shared] = {}
"""By event loop: a pool is bound to that in which it was started."""


async def take_pool(settings: PoolSettings) -> SandboxPool:
    """The pool of these settings, started by the first who takes it; give it back with `give_pool`. Raises
    IsolationError if this machine cannot give the level required."""
    key = (asyncio.get_running_loop(), settings)
    shared = _shared.setdefault(key, _Shared(settings))
    async with shared.started:
        if not shared.users:
            try:
                await shared.pool.start()
            except BaseException:
                _forget(key, shared)
                raise
        shared.users += 1
        return shared.pool


async def give_pool(settings: PoolSettings) -> None:
    """Close the pool if this was its last user."""
    key = (asyncio.get_running_loop(), settings)
    shared = _shared[key]
    shared.users -= 1
    if not shared.users:
        _forget(key, shared)
        await shared.pool.close()


def _forget(key: _Key, shared: _Shared) -> None:
    if _shared.get(key) is shared:
        del _shared[key]
