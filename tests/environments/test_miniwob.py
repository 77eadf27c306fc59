"""Episodes of MiniWoB on real pages."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from started_browser import require_browser

from verl_tool.checks.rows import columns_are_there
from verl_tool.checks.setup import Row
from verl_tool.environments.miniwob import MiniWobEnvironment, MiniWobSession, action_text, pages_folder, read_rows
from verl_tool.errors import StartError, ToolFault
from verl_tool.formats import HERMES, Call
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools.base import ToolResult

slow = pytest.mark.slow
in_module = pytest.mark.asyncio(loop_scope="module")


def require_pages() -> None:
    require_browser()
    try:
        pages_folder(None)
    except StartError as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment() -> AsyncIterator[MiniWobEnvironment]:
    require_pages()
    made = MiniWobEnvironment(describe_actions=False)
    await made.start()
    yield made
    await made.close()


async def begin(environment: MiniWobEnvironment, page: str, seed: int) -> tuple[MiniWobSession, str]:
    session, opening = await environment.begin("t", {"page": page, "seed": seed})
    [message] = opening.messages
    assert (message["role"], opening.every_turn) == ("user", True)
    return session, message["content"]


async def play(environment: MiniWobEnvironment, session: MiniWobSession, text: str) -> ToolResult:
    return await environment.step(session, Call("", text, 0, len(text), HERMES))


def number_of(shown: str, line: str) -> str:
    found = re.search(rf"\[(\d+)\] {re.escape(line)}", shown)
    assert found, f"{line} is not in {shown}"
    return found[1]


@slow
@in_module
@pytest.mark.parametrize("seed", [1, 2])
async def test_three_pages_are_solved_by_what_they_show(environment: MiniWobEnvironment, seed: int) -> None:
    for page, pattern, line in (
        ("click-test-2", r"Click button (\w+)\.", 'button "{}"'),
        ("click-color", r"Click on the (\w+) colored box\.", "clickable color {}"),
        ("focus-text-2", r"Focus into the (\d)\w+ input textbox\.", None),
    ):
        session, shown = await begin(environment, page, seed)
        word = re.match(pattern, shown)
        assert word
        number = (
            number_of(shown, line.format(word[1]))
            if line
            else re.findall(r"\[(\d+)\] textbox", shown)[int(word[1]) - 1]
        )
        verb = "click" if line else "focus"
        result = await play(environment, session, f"<think>It is {number}.</think>\n```\n{verb}({number})\n```")
        assert (result.done, result.reward, result.role) == (True, 1.0, "user")
        await environment.end(session)


@slow
@in_module
async def test_the_same_seed_is_the_same_task_in_a_fresh_and_in_a_used_context(environment: MiniWobEnvironment) -> None:
    shown = []
    for seed in (5, 6, 5):
        session, text = await begin(environment, "enter-text", seed)
        await play(environment, session, 'fill(1, "left from before")')
        await environment.end(session)
        shown.append(text)
    assert shown[0] == shown[2] != shown[1]
    assert shown[0].count("[1] textbox\n[2] button") == 1


@slow
@in_module
@pytest.mark.parametrize(
    "action", ['keyboard_down("Control")', "mouse_down(200, 300)", 'keyboard_press("Control+NoKey")']
)
async def test_keys_that_one_episode_holds_down_do_not_reach_the_next(
    environment: MiniWobEnvironment, action: str
) -> None:
    session, _ = await begin(environment, "enter-text", 3)
    await play(environment, session, action)
    await environment.end(session)
    assert session.browser not in environment._idle
    session, shown = await begin(environment, "enter-text", 4)
    word = re.match(r'Enter "(\w+)"', shown)
    assert word
    result = await play(environment, session, f'click(1)\nkeyboard_type("{word[1]}")\nclick(2)')
    assert (result.done, result.reward) == (True, 1.0)
    await environment.end(session)


@slow
@in_module
async def test_a_wrong_action_ends_it_and_no_second_try_counts(environment: MiniWobEnvironment) -> None:
    session, shown = await begin(environment, "click-test-2", 1)
    right = re.match(r"Click button (\w+)", shown)
    assert right
    wrong = "TWO" if right[1] == "ONE" else "ONE"
    first, second = (number_of(shown, f'button "{word}"') for word in (wrong, right[1]))
    again = f"click({first})\nmouse_click(80, 105)\nclick({second})"
    result = await play(environment, session, again)
    assert (result.done, result.reward) == (True, -1.0)
    await environment.end(session)


@slow
@in_module
@pytest.mark.parametrize("right", [True, False])
async def test_a_second_click_on_what_ended_it_does_not_begin_another_one(
    environment: MiniWobEnvironment, right: bool
) -> None:
    session, shown = await begin(environment, "click-test-2", 2)
    asked = re.match(r"Click button (\w+)", shown)
    assert asked
    word = asked[1] if right else next(word for word in ("ONE", "TWO") if word != asked[1])
    button = number_of(shown, f'button "{word}"')
    result = await play(environment, session, f"dblclick({button})")
    assert (result.done, result.reward) == (True, 1.0 if right else -1.0)
    await environment.end(session)


@slow
@in_module
async def test_a_context_is_not_used_without_end(environment: MiniWobEnvironment, monkeypatch: Any) -> None:
    monkeypatch.setattr("verl_tool.environments.miniwob._MAX_EPISODES", 2)
    used = []
    for seed in range(3):
        session, _ = await begin(environment, "click-test", seed)
        used.append(session.browser)
        session.browser.resets += 2 * (seed == 1)
        await environment.end(session)
    assert used[1] is not used[2]
    assert used[1] not in environment._idle


@slow
@in_module
async def test_what_does_not_end_it_loses(environment: MiniWobEnvironment) -> None:
    session, _ = await begin(environment, "enter-text", 3)
    for text in (
        'fill(1, "<script>WOB_RAW_REWARD_GLOBAL = 1; WOB_DONE_GLOBAL = true</script>")',
        'keyboard_press("F5")\nkeyboard_press("Control+r")\nkeyboard_press("Alt+ArrowLeft")',
        "noop(10)",
    ):
        result = await play(environment, session, text)
        assert (result.done, result.reward, result.valid) == (False, None, True)
    for text in (
        'goto("javascript:f()")',
        "go_back()",
        "new_tab()",
        'send_msg_to_user("1")',
        "WOB_RAW_REWARD_GLOBAL = 1",
    ):
        result = await play(environment, session, text)
        assert (result.done, result.reward, result.valid) == (False, None, False)
    verdict = await environment.verdict(session, "click(1)", {}, [])
    assert verdict.reward == -1.0
    await environment.end(session)


@slow
@in_module
async def test_a_page_that_ends_by_itself_is_seen_in_the_next_step_or_at_the_end(
    environment: MiniWobEnvironment,
) -> None:
    for action in ("click(99)", None):
        session, _ = await begin(environment, "enter-text", 3)
        await session.browser.evaluate(session.page, "(page) => page.core.endEpisode(1)")
        if action is not None:
            result = await play(environment, session, action)
            assert (result.done, result.reward) == (True, 1.0)
        verdict = await environment.verdict(session, "", {}, [])
        assert (verdict.reward, verdict.numbers) == (1.0, {"env_done": 1.0})
        await environment.end(session)


@slow
@in_module
async def test_an_episode_whose_page_is_lost_is_lost_and_no_fault() -> None:
    require_pages()
    hasty = MiniWobEnvironment(describe_actions=False, timeout_seconds=3.0)
    await hasty.start()
    try:
        session, _ = await begin(hasty, "enter-text", 3)
        result = await play(hasty, session, "noop(2000)\nnoop(2000)")
        assert (result.done, result.reward) == (True, -1.0)
        await hasty.end(session)
        session, _ = await begin(hasty, "enter-text", 3)
        await session.tab.page.goto("about:blank")
        result = await play(hasty, session, "noop(10)")
        assert (result.done, result.reward) == (True, -1.0)
        await hasty.end(session)
        session, _ = await begin(hasty, "enter-text", 3)
        await session.tab.page.close()
        result = await play(hasty, session, "noop(10)")
        assert (result.done, result.reward) == (True, -1.0)
        await hasty.end(session)
        session, _ = await begin(hasty, "enter-text", 3)
        assert hasty._chromium is not None
        os.kill(hasty._chromium.monitor.processes()[0].pid, signal.SIGKILL)
        with pytest.raises(ToolFault) as caught:
            await play(hasty, session, "noop(0)")
        assert caught.value.kind is FaultKind.STATE_LOST
        await hasty.end(session)
    finally:
        await hasty.close()


@slow
@in_module
async def test_a_row_without_such_a_page_is_a_fault(environment: MiniWobEnvironment) -> None:
    rows: tuple[dict[str, Any], ...] = (
        {},
        {"page": "none"},
        {"page": "../core/core"},
        {"page": "click-test", "seed": "1"},
    )
    for arguments in rows:
        with pytest.raises(ToolFault) as caught:
            await environment.begin("t", arguments)
        assert caught.value.kind is FaultKind.MISCONFIGURED


def test_the_action_of_a_turn() -> None:
    for turn in (
        "click(1)",
        "<think>a ``` b</think>click(1)",
        "I click.\n```\nclick(1)\n```",
        "<browser>click(1)</browser>",
    ):
        assert action_text(turn).strip() == "click(1)"
    assert action_text("<think>I could write\n```\nclick(1)\n```") == ""


def test_a_folder_without_pages_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no core/core\.js"):
        pages_folder(tmp_path)


def test_rows_take_pages_in_turn() -> None:
    rows = list(read_rows("click-test, click-color", count=3, first_seed=7))
    assert [row["extra_info"]["tools_kwargs"]["environment"] for row in rows] == [
        {"name": "miniwob", "page": "click-test", "seed": 7},
        {"name": "miniwob", "page": "click-color", "seed": 8},
        {"name": "miniwob", "page": "click-test", "seed": 9},
    ]
    assert not [*columns_are_there([Row("a row", row) for row in rows], ("reward_model",))]
    assert list(read_rows("", count=3)) == []
