"""What a row requests of its trajectory's container, within what the settings allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.egress import narrow_hosts
from verl_tool.sandbox.backends.settings import ContainerSettings
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.workspace_limits import WorkspaceLimits


def check_row_limits(
    requested: WorkspaceLimits, max_cpus: float, max_memory_mb: float, allowed_hosts: Sequence[str]
) -> None:
    """Raise ConfigError if a row requests more than the options ``max_row_cpus``, ``max_row_memory_mb`` and
    ``allowed_hosts`` allow, or a host that is none."""
    amounts = (("cpus", requested.cpus, max_cpus), ("memory_mb", requested.memory_mb, max_memory_mb))
    for name, amount, maximum in amounts:
        if amount is not None and amount > maximum:
            raise ConfigError(
                f"the row requests {name}={amount:g}, and at most {maximum:g} is allowed; raise max_row_{name}"
            )
    if requested.allowed_hosts is not None:
        narrow_hosts(allowed_hosts, requested.allowed_hosts)


def apply_row_limits(
    requested: WorkspaceLimits, settings: ContainerSettings, limits: SessionLimits
) -> tuple[ContainerSettings, SessionLimits]:
    """Return the settings and limits of a container with what a row requests."""
    changes = requested.model_dump(include={"cpus", "allowed_hosts"}, exclude_none=True)
    memory: dict[str, Any] = {} if requested.memory_mb is None else {"memory_bytes": requested.memory_mb << 20}
    return replace(settings, **changes), replace(limits, **memory)
