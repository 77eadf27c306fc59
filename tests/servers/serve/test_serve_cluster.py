"""What a `ServeCluster` refuses, without a Ray cluster."""

from __future__ import annotations

import pytest

from verl_tool.errors import ConfigError
from verl_tool.servers.serve.serve_cluster import ServeCluster


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a/b", "-a", "\u00e9", "a" * 129])
def test_what_is_no_name_for_an_application_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--app_name is "):
        ServeCluster(host="127.0.0.1", port=5000, app_name=name)


def test_the_longest_name_is_taken() -> None:
    assert ServeCluster(host="127.0.0.1", port=5000, app_name="a" * 128).app_name == "a" * 128
