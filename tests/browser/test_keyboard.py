"""Keys, which copy nothing from one context to another."""

from __future__ import annotations

import pytest
from hostile_pages import HostilePages

from verl_tool.browser.action_syntax import parse_actions
from verl_tool.browser.browser_session import BrowserLimits, BrowserSession
from verl_tool.browser.chromium import Chromium

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SHORTCUTS = (
    'press("1", "Control+v")',
    'press("1", "ControlOrMeta+Shift+KeyV")',
    'keyboard_press("ShiftRight+Insert")',
    'keyboard_press("Control+v+a")',
    'keyboard_down("Control")\nkeyboard_type("v")',
    'keyboard_down("v")',
    'keyboard_up("ControlRight")\nkeyboard_down("Shift")\nkeyboard_press("Insert")',
    'keyboard_up("Shift")\nkeyboard_press("Control+c")',
    'press("1", "Control+x")',
)


async def test_contexts_do_not_share_a_clipboard(browser: Chromium, pages: HostilePages) -> None:
    limits = BrowserLimits(step_seconds=10.0)
    sessions = [await BrowserSession.open(browser, [pages.host], limits) for _ in range(2)]
    first, second = sessions

    async def do(session: BrowserSession, text: str) -> str:
        return (await session.perform(parse_actions(text))).text

    try:
        await do(first, f'goto("{pages.url}/copy")')
        copied = await do(first, 'fill("1", "SECRET")\nclick("2")')
        assert '"true"' in copied
        await do(second, f'goto("{pages.url}/paste")')
        shown = await do(second, 'click("2")\nnoop(300)\nclick("1", "middle")')
        assert "Error" not in shown
        for action in SHORTCUTS:
            refused = await do(second, f'focus("1")\n{action}')
            assert refused.startswith("Error: the clipboard cannot be used here")
            shown += refused
        await do(second, 'keyboard_press("Control+NoKey")')
        shown += await do(second, 'keyboard_press("v")\nnoop(100)')
        assert "SECRET" not in shown
        assert 'value="v+v"' in await do(
            second, 'keyboard_up("Control")\nkeyboard_type("v+")\nkeyboard_press("Shift+v")'
        )
    finally:
        for session in sessions:
            await session.close()
