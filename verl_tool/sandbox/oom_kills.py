"""Decide whether a run that the kernel killed for memory exceeded its own limit, or others took the memory."""

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
    """Return the number of processes that the kernel has killed for memory on this machine since it booted."""
    with open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def judge_by_group(ended: RunStatus, group: RunGroup, fair_share: int) -> RunStatus:
    """Complete the status of a run by the counts of its control group.

    A killed run that used more than `fair_share` bytes hit its memory limit. Raises CollateralOomError if it used less.
    """
    ended = replace(ended, cpu_seconds=max(ended.cpu_seconds, group.cpu_seconds()))
    if not group.lost_process():
        return ended
    if group.exceeded_memory() or max(group.max_memory, ended.peak_memory_bytes) > fair_share:
        return replace(ended, limit_hit="memory_bytes")
    raise killed_for_others()


def judge_without_group(ended: RunStatus, kills_before: int, fair_share: int) -> RunStatus:
    """The same without control groups, by `kills_before`, the value of `machine_kills` before the run.

    Raises CollateralOomError if the run was killed, the count of the machine grew, and the run used little memory.
    """
    killed = ended.limit_hit is None and os.WIFSIGNALED(ended.status) and os.WTERMSIG(ended.status) == signal.SIGKILL
    if not killed or machine_kills() == kills_before:
        return ended
    if ended.peak_memory_bytes > fair_share:
        return replace(ended, limit_hit="memory_bytes")
    raise killed_for_others()


def killed_for_others() -> CollateralOomError:
    """Return the error for a run that was killed for the memory use of others."""
    return CollateralOomError(
        "the kernel killed a run for memory that others had taken; lower max_concurrent", retryable=False
    )
