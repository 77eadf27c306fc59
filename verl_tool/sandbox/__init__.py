"""Run untrusted Python code, isolated and within limits, many programs at a time. Independent of tools and HTTP.

async with SandboxPool() as pool:
    result = await pool.run("print(1 + 1)")
"""

from verl_tool.errors import IsolationError, SandboxError
from verl_tool.sandbox.isolation.levels import Isolation, Level
from verl_tool.sandbox.limits import Limits, SessionLimits
from verl_tool.sandbox.policy import Policy
from verl_tool.sandbox.pool import WARM_MODULES, PoolStats, SandboxPool
from verl_tool.sandbox.result import CellResult, RunResult
from verl_tool.sandbox.session import Session, SessionProcess

__all__ = [
    "WARM_MODULES",
    "CellResult",
    "Isolation",
    "IsolationError",
    "Level",
    "Limits",
    "Policy",
    "PoolStats",
    "RunResult",
    "SandboxError",
    "SandboxPool",
    "Session",
    "SessionLimits",
    "SessionProcess",
]
