"""Whose memory it was when the kernel killed a run: its own, or somebody else's."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from verl_tool.errors import SandboxError
from verl_tool.sandbox.isolation.cgroup import RunGroup
from verl_tool.sandbox.worker import RunStatus


class CollateralOomError(SandboxError):
    """The kernel killed a run because others had taken the machine's memory, or the pool's."""


def machine_kills() -> int:
    """Processes that the kernel has killed for memory on this machine, ever."""
    with open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def judge_by_group(ended: RunStatus, group: RunGroup, fair_share: int) -> RunStatus:
    """How a run ended by its forkserver, with what its own group knows of it. One that uses more than `fair_share`
    bytes when there is no more has itself to blame. Raises CollateralOomError if one of its processes was killed for
    memory that it had not taken."""
    ended = replace(ended, cpu_seconds=max(ended.cpu_seconds, group.cpu_seconds()))
    if not group.lost_process():
        return ended
    if group.exceeded_memory() or max(group.max_memory, ended.peak_memory_bytes) > fair_share:
        return replace(ended, limit_hit="memory_bytes")
    raise killed_for_others()


def judge_without_group(ended: RunStatus, kills_before: int, fair_share: int) -> RunStatus:
    """The same where runs have no groups: by a count of the whole machine's, `machine_kills` before the run. Raises
    CollateralOomError if it was killed while the kernel killed for memory, and had not taken much."""
    killed = ended.limit_hit is None and os.WIFSIGNALED(ended.status) and os.WTERMSIG(ended.status) == signal.SIGKILL
    if not killed or machine_kills() == kills_before:
        return ended
    if ended.peak_memory_bytes > fair_share:
        return replace(ended, limit_hit="memory_bytes")
    raise killed_for_others()


def killed_for_others() -> CollateralOomError:
    """The error for a run that was killed for memory that others had taken."""
    return CollateralOomError(
        "the kernel killed a run for memory that others had taken; lower max_concurrent", retryable=False
    )
