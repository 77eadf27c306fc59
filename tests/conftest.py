"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from live_server import LiveServers


@pytest.fixture
async def servers() -> AsyncIterator[LiveServers]:
    """Starts tool servers in this process; all are stopped at the end of the test."""
    running = LiveServers()
    try:
        yield running
    finally:
        await running.stop()
