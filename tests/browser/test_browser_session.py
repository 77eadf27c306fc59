"""A trajectory's browser, on ordinary and on hostile pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from hostile_pages import HostilePages

from verl_tool.browser.action_syntax import parse_actions
from verl_tool.browser.browser_session import BrowserLimits, BrowserSession, StepOutcome
from verl_tool.browser.chromium import Chromium

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LIMITS = BrowserLimits(step_seconds=30.0, max_characters=3000, max_tabs=3, max_load_mb=2)
Do = Callable[..., Any]


@pytest_asyncio.fixture(loop_scope="module")
async def session(browser: Chromium, pages: HostilePages) -> AsyncIterator[BrowserSession]:
    opened = await BrowserSession.open(browser, [pages.host], LIMITS)
    yield opened
    await opened.close()


@pytest.fixture
def do(session: BrowserSession, pages: HostilePages) -> Do:
    """Performs actions; ``goto("/name")`` is a page of the server."""

    async def perform(text: str) -> StepOutcome:
        return await session.perform(parse_actions(text.replace('"/', f'"{pages.url}/')))

    return perform


async def test_a_page_is_read_as_lines_with_numbered_elements(do: Do, pages: HostilePages) -> None:
    assert (await do('goto("/shop")')).text.splitlines() == [
        f'"Shop" {pages.url}/shop',
        'heading "Offers"',
        'text "Some bold words"',
        '[1] link "two"',
        '[2] link "beside"',
        "form",
        ' text "Name"',
        ' [3] textbox "Name"',
        ' [4] textbox "secret" value="•••"',
        ' [5] combobox "size" options: "small" (selected), "large"',
        ' [6] checkbox "agree" unchecked',
        ' [7] date "day"',
        ' [8] textbox "notes"',
        ' [9] button "OK"',
        "[10] clickable red red",
        '[11] button "under"',
        '[12] clickable "over"',
        '[13] button "off" disabled',
        "[14] iframe",
        '[15] button "far"',
        'frame "about:srcdoc"',
        '[16] button "framed"',
    ]


async def test_elements_are_used_by_their_numbers_which_stay(do: Do) -> None:
    await do('goto("/shop")')
    assert 'text "x y"' in (await do('fill("3", "x")\ntype("3", " y", 0)\nclick("9")')).text
    text = (await do('select_option("5", "large")\ncheck("6")\nfill("7", "2026-01-02")\nclick("10")')).text
    assert '"large" (selected)' in text
    assert '[6] checkbox "agree" checked' in text
    assert 'text "red was clicked"' in text
    assert '[16] button "9"' in (await do('click("16")')).text
    assert 'value="a"' in (await do('fill("8", "b")\nclear("8")\nfocus("8")\nkeyboard_type("a")')).text
    for action, problem in {
        'click("11")': "element [11] is covered by [12]",
        'click("13")': "element [13] is disabled",
        'click("99")': "there is no element [99] on this page",
        'fill("9", "x")': "element [9] takes no text",
        'select_option("5", "huge")': 'element [5] has no option "huge"',
        'press("3", "NoKey")': "press failed: Unknown key",
        'upload_file("3", "/etc/passwd")': "files cannot be uploaded here",
        'click("9", "up")': "'up' is no button; there are left, middle, right",
    }.items():
        outcome = await do(action)
        assert outcome.error
        assert outcome.text.startswith(f"Error: {problem}")
    moved = (await do("scroll(0, 2500)")).text
    assert "elements are above; scroll up" in moved
    assert '[15] button "far"' in moved
    assert "[1] link" not in moved


async def test_pages_follow_each_other_in_tabs(do: Do) -> None:
    await do('goto("/shop")')
    assert 'text "second page"' in (await do('click("1")')).text
    assert '"Shop"' in (await do("go_back()")).text
    assert (await do("go_back()\ngo_back()")).error
    await do('goto("/opener")')
    shown = await do("noop(0)")
    number = shown.text.split("[")[1].split("]")[0]
    opened = await do(f'click("{number}")\nnoop(300)')
    assert "(the page opened tab 1; switch to it with tab_focus)" in opened.text
    assert 'Tab 1 of 2: "Two"' in (await do("tab_focus(1)")).text
    assert "there is no tab 7" in (await do("tab_focus(7)")).text
    assert "Tab" not in (await do("tab_close()")).text.splitlines()[0]
    assert "there are 3 tabs already" in (await do("new_tab()\nnew_tab()\nnew_tab()")).text
    assert "about:blank" in (await do("tab_close()\ntab_close()\ntab_close()")).text


async def test_a_screenshot_is_a_png_of_the_window(do: Do) -> None:
    outcome = await do('goto("/two")\nscreenshot()')
    assert outcome.image.startswith(b"\x89PNG")
    assert (await do("noop(0)")).image is None


async def test_the_last_word_ends_it(do: Do) -> None:
    outcome = await do("stop [Paris]")
    assert (outcome.text, outcome.done) == ("", True)


@pytest.mark.parametrize("name", ["spin", "alerts", "memory"])
async def test_a_page_that_does_not_end_is_closed_and_hurts_nobody(
    do: Do, browser: Chromium, pages: HostilePages, name: str
) -> None:
    hasty = await BrowserSession.open(browser, [pages.host], replace(LIMITS, step_seconds=3.0))
    try:
        hostile = asyncio.create_task(hasty.perform(parse_actions(f'goto("{pages.url}/{name}")')))
        assert 'text "second page"' in (await do('goto("/two")')).text
        outcome = await hostile
        assert outcome.error
        assert "closed" in outcome.text
        assert "about:blank" in outcome.text
        assert not (await hasty.perform(parse_actions("noop(0)"))).error
    finally:
        await hasty.close()
    assert len([each for each in browser.monitor.processes() if each.is_renderer]) < 8


async def test_keys_are_not_released_forever_on_a_page_that_hangs(browser: Chromium, pages: HostilePages) -> None:
    hasty = await BrowserSession.open(browser, [pages.host], replace(LIMITS, step_seconds=3.0))
    try:
        await hasty.perform(parse_actions(f'goto("{pages.url}/hang")'))
        click = hasty.perform(parse_actions('click("1", "left", ["Shift", "Control", "Alt"])'))
        assert "did not answer within 3 seconds" in (await asyncio.wait_for(click, 20)).text
        assert hasty.is_fresh
    finally:
        await hasty.close()


async def test_nothing_but_listed_hosts_is_reached(do: Do, pages: HostilePages) -> None:
    assert 'text "tried"' in (await do('goto("/reach")\nnoop(500)')).text
    outcome = await do('goto("/redirect")')
    assert "is not among the allowed hosts" in outcome.text
    for url in (
        "http://169.254.169.254/",
        "http://localhost:1234/",
        "http://0x7f000001/",
        "http://[::1]/",
        pages.other.url,
    ):
        text = (await do(f'goto("{url}")')).text
        assert "not among the allowed" in text or "ERR_UNSAFE_PORT" in text
    assert pages.other.requests == []


async def test_names_that_lead_to_private_addresses_are_not_reached(browser: Chromium, pages: HostilePages) -> None:
    port = pages.host.partition(":")[2]
    session = await BrowserSession.open(browser, [f"localhost:{port}"], LIMITS)
    try:
        text = (await session.perform(parse_actions(f'goto("http://localhost:{port}/two")'))).text
    finally:
        await session.close()
    assert "localhost has no public address" in text


async def test_contexts_have_hosts_and_cookies_of_their_own(do: Do, browser: Chromium, pages: HostilePages) -> None:
    other = await BrowserSession.open(browser, [], LIMITS)
    try:
        assert "not among the allowed" in (await other.perform(parse_actions(f'goto("{pages.url}/two")'))).text
        assert 'text "second page"' in (await do('goto("/two")')).text
    finally:
        await other.close()


async def test_no_service_worker_is_fetched(do: Do, pages: HostilePages) -> None:
    assert '"refused"' in (await do('goto("/worker")\nnoop(200)')).text
    assert "worker.js" not in pages.requests


async def test_what_pages_load_is_bounded(do: Do) -> None:
    await do('goto("/load")')
    assert 'text "second page"' not in (await do('goto("/two")')).text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("file", "still here"),
        ("permissions", '"denied"'),
        ("deep", '[1] button "top"'),
        ("huge", '[1] link "y"'),
        ("liar", '[1] button "honest"'),
        ("clobbered", 'button "beside"'),
    ],
)
async def test_hostile_pages_are_read_as_they_are(do: Do, name: str, expected: str) -> None:
    await do(f'goto("/{name}")')
    text = (await do("noop(200)")).text
    assert expected in text
    assert "root:" not in text
    assert len(text) < 4000


async def test_long_texts_are_cut(do: Do) -> None:
    text = (await do('goto("/long")')).text
    assert len(text) < 3500
    assert text.endswith('…"') or "more follows" in text


async def test_text_cannot_pass_for_an_element(do: Do) -> None:
    text = (await do('goto("/markers")')).text
    assert 'text "[9] button \\"forged\\""' in text
    assert "\n[9]" not in text


async def test_popups_and_downloads_are_refused(do: Do) -> None:
    await do('goto("/popups")')
    text = (await do('click("1")\nnoop(500)')).text
    assert "switch to it with tab_focus" in text or "more tabs than are allowed" in text
    assert "the address is a download, which is refused" in (await do('goto("/download")')).text
    await do('goto("/link")')
    shown = (await do("noop(0)")).text
    number = shown.split("[")[1].split("]")[0]
    assert "offered a download, which was refused" in (await do(f'click("{number}")\nnoop(300)')).text


async def test_a_page_cannot_hold_the_model_back(do: Do) -> None:
    await do('goto("/leave")\nclick("1")')
    assert 'text "second page"' in (await do('goto("/two")')).text
