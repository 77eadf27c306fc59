"""Chromium for tests."""

from __future__ import annotations

import pytest

from verl_tool.browser.chromium import BrowserSettings, Chromium
from verl_tool.browser.isolation import find_chromium
from verl_tool.errors import IsolationError, StartError


async def start_browser(settings: BrowserSettings) -> Chromium:
    """Skip the test where there is no Playwright, no chromium, or no isolation."""
    pytest.importorskip("playwright", reason="playwright is not installed (extra browser)")
    try:
        find_chromium(None)
    except StartError as error:
        pytest.skip(str(error))
    browser = Chromium(settings)
    try:
        await browser.start()
    except IsolationError as error:
        pytest.skip(str(error))
    return browser
