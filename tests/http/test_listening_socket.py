"""The URL of a server, as its machine calls it."""

from __future__ import annotations

import pytest

from verl_tool.http.listening_socket import base_url


@pytest.mark.parametrize(
    ("host", "url"),
    [("localhost", "http://localhost:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"),
     ("fd00::1", "http://[fd00::1]:80")],
)  # fmt: skip
def test_a_server_is_called_by_an_address_of_its_own(host: str, url: str) -> None:
    assert base_url(host, 80) == url
