"""What a row of data requests of the container in which its trajectories work."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from verl_tool.errors import ConfigError
from verl_tool.protocol import WORKSPACE_LIMITS_FIELD

MIN_MEMORY_MB, _MAX_MEMORY_MB = 64, 1 << 24
_MIN_CPUS, _MAX_CPUS = 0.01, 4096


def _to_tuple(value: object) -> object:
    """Convert a list, or an array as pandas reads one from parquet."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


class WorkspaceLimits(BaseModel):
    """``tools_kwargs.workspace_limits`` of a row. A missing entry, or null, is that of the tool or program."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: Annotated[float, Field(ge=_MIN_CPUS, le=_MAX_CPUS, allow_inf_nan=False)] | None = None
    """CPU time a second."""
    memory_mb: Annotated[int, Field(ge=MIN_MEMORY_MB, le=_MAX_MEMORY_MB)] | None = None
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_to_tuple)] | None = None
    """Hosts that its programs reach; with an empty list, there is no network."""

    @classmethod
    def parse(cls, value: object, where: str = WORKSPACE_LIMITS_FIELD) -> WorkspaceLimits:
        """Parse a row's value; None requests nothing. Raises ConfigError, whose text begins with `where`."""
        try:
            return cls.model_validate({} if value is None else value)
        except ValidationError as error:
            problem = error.errors()[0]
            at = ".".join(map(str, (where, *problem["loc"][:1])))
            raise ConfigError(f"{at} is {problem['input']!r:.100}: {problem['msg']}") from None


NO_LIMITS = WorkspaceLimits()
