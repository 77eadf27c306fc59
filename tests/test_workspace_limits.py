"""What a row may say of its container."""

from __future__ import annotations

import pytest

from verl_tool.errors import ConfigError
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits


def test_rows_of_json_and_of_parquet_are_read_alike() -> None:
    numpy = pytest.importorskip("numpy")
    expected = WorkspaceLimits(cpus=2.0, memory_mb=4096, allowed_hosts=("pypi.org",))
    for row in (
        {"cpus": 2, "memory_mb": 4096, "allowed_hosts": ["pypi.org"]},
        {"cpus": 2.0, "memory_mb": 4096.0, "allowed_hosts": numpy.array(["pypi.org"], dtype=object)},
    ):
        assert WorkspaceLimits.parse(row) == expected
    assert (
        WorkspaceLimits.parse(None) == WorkspaceLimits.parse(dict.fromkeys(WorkspaceLimits.model_fields)) == NO_LIMITS
    )
    assert WorkspaceLimits.parse({"allowed_hosts": []}) != NO_LIMITS, "an empty list is no network"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"memory": 4096}, r"^row 7\.memory is 4096: Extra inputs"),
        ({"cpus": 0}, r"^row 7\.cpus is 0: "),
        ({"cpus": float("nan")}, r"^row 7\.cpus is nan: "),
        ({"memory_mb": 63}, r"^row 7\.memory_mb is 63: .*64"),
        ({"memory_mb": 10**400}, r"^row 7\.memory_mb is 1000"),
        ({"cpus": 1e-9}, r"^row 7\.cpus is 1e-09: "),
        ({"memory_mb": 64.5}, r"^row 7\.memory_mb is 64\.5: "),
        ({"allowed_hosts": "pypi.org"}, r"^row 7\.allowed_hosts is 'pypi\.org': "),
        ({"allowed_hosts": ["pypi.org", 3]}, r"^row 7\.allowed_hosts is 3: "),
        ("2 cpus", r"^row 7 is '2 cpus': "),
    ],
)
def test_what_is_no_limit_is_named(row: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkspaceLimits.parse(row, "row 7")
