"""Chromium itself: how it is confined, and what becomes of it when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from hostile_pages import HostilePages
from started_browser import start_browser

from verl_tool.browser.action_syntax import parse_actions
from verl_tool.browser.browser_session import BrowserLimits, BrowserLostError, BrowserSession
from verl_tool.browser.chromium import BrowserSettings, Chromium
from verl_tool.errors import StartError

pytestmark = pytest.mark.slow


def exists(path: str) -> bool:
    return Path(path).exists()


def read_environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_chromium_is_confined_and_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_SECRET", "secret")
    browser = await start_browser(BrowserSettings())
    try:
        assert browser.describe_isolation().startswith("full: ")
        session = await BrowserSession.open(browser, [], BrowserLimits(step_seconds=5.0))
        processes = browser.monitor.processes()
        root = processes[0].pid
        own = os.readlink("/proc/self/ns/net")
        assert all(os.readlink(f"/proc/{each.pid}/ns/net") != own for each in processes)
        assert not exists(f"/proc/{root}/root/etc/passwd")
        assert not exists(f"/proc/{root}/root{__file__}")
        assert b"BROWSER_SECRET" not in read_environment(root)
        os.kill(root, signal.SIGKILL)
        with pytest.raises(BrowserLostError):
            await session.perform(parse_actions("noop(0)\nnoop(500)"))
        assert not browser.alive
        with pytest.raises(BrowserLostError):
            await BrowserSession.open(browser, [], BrowserLimits())
        await session.close()
    finally:
        await browser.close()
    await asyncio.sleep(0.2)
    assert not any(exists(f"/proc/{each.pid}") for each in processes)


async def test_without_isolation_pages_still_reach_listed_hosts_only() -> None:
    browser = await start_browser(BrowserSettings(isolation="none"))
    async with HostilePages() as pages:
        try:
            assert browser.describe_isolation().startswith("none: ")
            session = await BrowserSession.open(browser, [pages.host], BrowserLimits())
            assert "second page" in (await session.perform(parse_actions(f'goto("{pages.url}/two")'))).text
            assert "not among the allowed" in (await session.perform(parse_actions('goto("http://127.0.0.1/")'))).text
            await session.close()
        finally:
            await browser.close()


async def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    with pytest.raises(StartError, match=r"verl-tool\[browser\]"):
        await Chromium(BrowserSettings()).start()
    monkeypatch.undo()
    pytest.importorskip("playwright", reason="playwright is not installed (extra browser)")
    with pytest.raises(StartError, match="which is no file"):
        await Chromium(BrowserSettings(executable=tmp_path / "none")).start()
