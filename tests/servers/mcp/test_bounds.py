"""What a server may send for one call."""

from __future__ import annotations

import pytest

from verl_tool.servers.mcp.bounds import MAX_BYTES, MAX_PARTS, Budget, TooMuchError


def test_bytes_and_messages_are_bounded_and_a_call_renews_both() -> None:
    budget = Budget()
    for _ in range(2):
        budget.renew()
        budget.take(MAX_BYTES)
        with pytest.raises(TooMuchError, match="16 MiB"):
            budget.take(1)
        budget.renew()
        for _ in range(MAX_PARTS):
            budget.take(0)
        with pytest.raises(TooMuchError, match=f"{MAX_PARTS} messages"):
            budget.take(0)
