"""One browser for all tests of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from hostile_pages import HostilePages
from started_browser import start_browser

from verl_tool.browser.chromium import BrowserSettings, Chromium


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Chromium]:
    started = await start_browser(BrowserSettings(max_page_mb=300))
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pages() -> AsyncIterator[HostilePages]:
    async with HostilePages() as other, HostilePages(other) as served:
        yield served
