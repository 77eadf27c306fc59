"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from live_server import LiveServers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes many minutes, unless asked for."""
    if os.environ.get("VERL_TOOL_E2E") == "1":
        return
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.skip(reason="takes many minutes; VERL_TOOL_E2E=1 runs it"))


@pytest.fixture
async def servers() -> AsyncIterator[LiveServers]:
    """Starts tool servers in this process; all are stopped at the end of the test."""
    running = LiveServers()
    try:
        yield running
    finally:
        await running.stop()
