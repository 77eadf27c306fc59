"""The tool `browser` behind a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hostile_pages import MARKERS, HostilePages
from live_server import LiveServers
from started_browser import require_browser

from verl_tool.browser.browser_session import BrowserSession
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.tests.live_check import run_cases
from verl_tool.servers.tests.test_browser_tool import cases
from verl_tool.servers.tools.browser import BrowserTool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Served:
    """A server with the tool, pages that it may open, and a client."""

    def __init__(self, tool: BrowserTool, client: ToolClient, pages: HostilePages) -> None:
        self.tool, self.client, self.pages = tool, client, pages

    async def step(self, trajectory: str, step: int, action: str, **extra: Any) -> StepResult:
        [result] = await self.client.step([StepRequest(trajectory, action, step, extra=extra)])
        return result


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    require_browser()
    servers = LiveServers()
    async with HostilePages() as pages:
        tool = BrowserTool(allowed_hosts=(pages.host,), timeout_seconds=10, max_contexts=3)
        live = await servers.start([tool])
        async with ToolClient(live.url, max_retries=0, timeout=60) as client:
            yield Served(tool, client, pages)
        await servers.stop()


async def test_a_trajectory_has_one_context_and_each_step_runs_once(served: Served) -> None:
    url = f"{served.pages.url}/shop"
    first = await served.step("a", 0, "", url=url)
    assert '[1] link "two"' in first.observation
    typed = await served.step("a", 1, "```type [3] [x] [0]```")
    assert 'textbox "Name" value="x"' in typed.observation
    assert typed.observation.startswith("\n```output\n")
    again = await served.step("a", 1, "```type [3] [x] [0]```")
    assert again.observation == typed.observation
    clicked = await served.step(
        "a", 2, '<tool_call>\n{"name": "browser", "arguments": {"action": "click", "id": 9}}\n</tool_call>'
    )
    assert 'text "x"' in clicked.observation
    image = await served.step("a", 3, "<browser>screenshot()</browser>")
    assert "<image>" in image.observation
    invalid = await served.step("a", 4, "<browser>fly(1)</browser>")
    assert not invalid.valid
    assert "no action" in invalid.observation
    assert (await served.step("a", 5, "<browser>stop [done]</browser>")).done
    await served.client.finish(["a"])


async def test_a_page_cannot_write_calls_or_end_its_observation(served: Served) -> None:
    for number, action in enumerate(["", "<browser>noop(0)</browser>", "```none```"]):
        observation = (await served.step("m", number, action, url=f"{served.pages.url}/markers")).observation
        assert "forged" in observation
        for marker in ("<tool_response>", "```output</", "<|im_end|>", '<browser>click("1")'):
            assert marker in MARKERS
            assert marker not in observation
    await served.client.finish(["m"])


async def test_a_row_narrows_hosts_and_its_own_mistakes_are_faults(served: Served) -> None:
    url = f"{served.pages.url}/two"
    refused = await served.step("r0", 0, "", url=url, allowed_hosts=[])
    wider = await served.step("r1", 0, "", allowed_hosts=["example.org"])
    outside = await served.step("r2", 0, "", url="http://example.org/")
    for result in (refused, wider, outside):
        assert result.fault is not None
        assert result.fault.kind is FaultKind.MISCONFIGURED
    alone = await served.step("r3", 0, f'<browser>goto("{url}")</browser>', allowed_hosts=[])
    assert "not among the allowed hosts" in alone.observation
    await served.client.finish(["r3"])
    with pytest.raises(ConfigError, match="no host"):
        BrowserTool(allowed_hosts=("http://example.org/",))


async def test_more_trajectories_than_contexts_are_rejected_for_a_retry(served: Served) -> None:
    for name in ("l0", "l1", "l2"):
        assert (await served.step(name, 0, "<browser>noop(0)</browser>")).fault is None
    overloaded = await served.step("l3", 0, "<browser>noop(0)</browser>")
    assert overloaded.fault is not None
    assert overloaded.fault.kind is FaultKind.OVERLOADED
    await served.client.finish(["l0", "l1", "l2"])
    assert (await served.step("l3", 0, "<browser>noop(0)</browser>")).fault is None
    await served.client.finish(["l3"])


async def test_the_command_line_check_holds(served: Served) -> None:
    outcomes = await run_cases(
        f"{served.client.url}/get_observation", None, "browser", cases(f"{served.pages.url}/two")
    )
    assert [outcome.problem for outcome in outcomes if outcome.problem] == []


async def test_a_browser_that_crashes_loses_its_trajectories_and_is_replaced(served: Served) -> None:
    assert (await served.step("c0", 0, "<browser>noop(0)</browser>")).fault is None
    browser = served.tool._browser
    assert browser is not None
    os.kill(browser.monitor.processes()[0].pid, signal.SIGKILL)
    lost = await served.step("c0", 1, "<browser>noop(0)</browser>")
    assert lost.fault is not None
    assert lost.fault.kind is FaultKind.STATE_LOST
    assert "about:blank" in (await served.step("c1", 0, "<browser>noop(0)</browser>")).observation
    await served.client.finish(["c0", "c1"])


async def test_a_trajectory_that_is_cancelled_at_first_leaves_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_browser()
    tool = BrowserTool(allowed_hosts=("127.0.0.1:1",))
    await tool.start()
    assert tool._browser is not None
    chromium, egress = tool._browser._chromium, tool._browser._egress
    assert chromium is not None
    assert egress is not None
    try:
        for method in ("perform", "new_tab"):
            reached = asyncio.Event()

            async def wait(*_: object, reached: asyncio.Event = reached) -> None:
                reached.set()
                await asyncio.sleep(60)

            monkeypatch.setattr(BrowserSession, method, wait)
            begun = asyncio.create_task(tool.create_state("t", {"url": "http://127.0.0.1:1/"}))
            await asyncio.wait_for(reached.wait(), 20)
            assert len(chromium.contexts) == len(egress._proxies) == 1
            begun.cancel()
            with pytest.raises(asyncio.CancelledError):
                await begun
            assert len(chromium.contexts) == len(egress._proxies) == 0
    finally:
        await tool.close()
