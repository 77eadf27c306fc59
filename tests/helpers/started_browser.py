"""Chromium for tests."""

from __future__ import annotations

import pytest

from verl_tool.browser.chromium import BrowserSettings, Chromium
from verl_tool.browser.isolation import find_chromium, require_confinement
from verl_tool.errors import IsolationError, StartError


def require_browser(isolation: str = "full") -> None:
    """Skip the test where there is no Playwright, no chromium, or no isolation."""
    pytest.importorskip("playwright", reason="playwright is not installed (extra browser)")
    try:
        find_chromium(None)
        require_confinement(isolation)
    except (StartError, IsolationError) as error:
        pytest.skip(str(error))


async def start_browser(settings: BrowserSettings) -> Chromium:
    """Skip the test where it cannot be started."""
    require_browser(settings.isolation)
    browser = Chromium(settings)
    await browser.start()
    return browser
