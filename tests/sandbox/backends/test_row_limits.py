"""What a row requests of its container, and what the settings allow."""

from __future__ import annotations

import pytest

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends import ContainerSettings
from verl_tool.sandbox.backends.row_limits import apply_row_limits, check_row_limits
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

SETTINGS = ContainerSettings("docker", "any", cpus=1.5, allowed_hosts=("pypi.org",))
LIMITS = SessionLimits(memory_bytes=1 << 30)


def test_what_is_requested_holds_and_the_rest_is_that_of_the_settings() -> None:
    assert apply_row_limits(NO_LIMITS, SETTINGS, LIMITS) == (SETTINGS, LIMITS)
    settings, limits = apply_row_limits(WorkspaceLimits(memory_mb=512, allowed_hosts=()), SETTINGS, LIMITS)
    assert (settings.cpus, settings.allowed_hosts, limits.memory_bytes) == (1.5, (), 512 << 20)
    settings, limits = apply_row_limits(WorkspaceLimits(cpus=0.5), SETTINGS, LIMITS)
    assert (settings.cpus, settings.allowed_hosts, limits.memory_bytes) == (0.5, ("pypi.org",), 1 << 30)


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ({"cpus": 4.5}, r"requests cpus=4\.5, and at most 4 is allowed; raise max_row_cpus"),
        ({"memory_mb": 8193}, r"requests memory_mb=8193, and at most 8192 is allowed; raise max_row_memory_mb"),
        ({"allowed_hosts": ["pypi.org", "*"]}, r"allows the host '\*'.*only narrow"),
        ({"allowed_hosts": ["pypi.org/simple"]}, r"'pypi\.org/simple' is no host"),
    ],
)
def test_more_than_is_allowed_is_refused(requested: dict[str, object], words: str) -> None:
    check_row_limits(WorkspaceLimits(cpus=4, memory_mb=8192, allowed_hosts=("pypi.org",)), 4, 8192, ["pypi.org"])
    check_row_limits(NO_LIMITS, 0.1, 64, [])
    with pytest.raises(ConfigError, match=words):
        check_row_limits(WorkspaceLimits.parse(requested), 4, 8192, ["pypi.org"])
