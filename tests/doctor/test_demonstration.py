"""One call through the real loop."""

from __future__ import annotations

import pytest
from doctor_setups import HERMES_LIKE, NATIVE, PLAIN, TOOLS, family, row, setup_of
from toy_environments import GuessEnvironment

from verl_tool.agent_loop.trajectory import Author, StopReason
from verl_tool.checks.setup import MADE_UP_TOOL, Setup
from verl_tool.doctor.demonstration import ANSWER, SUMMARY, Demonstration, StandIn, demonstrate
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools


async def shown(setup: Setup, turn: str | None = None) -> Demonstration:
    return await demonstrate(setup, StandIn(setup), setup.rows[0] if setup.rows else None, turn)


def written(demonstration: Demonstration, author: Author) -> str:
    return "|".join(s.text for s in demonstration.trajectory.response if s.author is author)


@pytest.mark.parametrize("name", NATIVE)
async def test_a_native_call_is_found_and_answered_in_the_template_s_own_way(name: str) -> None:
    fmt, ends = NATIVE[name]
    setup = setup_of(family(name, *ends), [MADE_UP_TOOL], formats=[fmt], mtrl_role="tool")
    demonstration = await shown(setup)
    [call] = demonstration.calls
    assert (call.name, call.format.name) == ("weather", fmt)
    assert demonstration.end_reason.startswith("the end token")
    assert written(demonstration, Author.TOOL).strip('"') == "(the tool's answer)"
    assert demonstration.trajectory.stop is StopReason.ANSWERED
    assert written(demonstration, Author.MODEL).endswith(ANSWER + ends[0])
    assert sum(demonstration.action_mask) > 0
    assert not any(
        a > m for a, m in zip(demonstration.action_mask, demonstration.trajectory.response_mask, strict=True)
    )


async def test_a_tool_in_this_process_answers_and_the_stop_string_ends_the_turn() -> None:
    setup = setup_of(PLAIN, TOOLS[:1], enable_mtrl=False, action_stop_tokens=["<call>", "<submit>"])
    async with InProcessTools(load_tools("calculator")) as tools:
        demonstration = await demonstrate(setup, tools)
    assert demonstration.end_reason == "the stop string '<call>'"
    [record] = demonstration.trajectory.calls
    assert record.valid
    assert "10.1" in record.observation


async def test_what_the_row_sends_and_lists_is_what_the_tools_get() -> None:
    lists = row(extra_info={"tools_kwargs": {"tools": ["finish"], "unit": "m"}})
    setup = setup_of(HERMES_LIKE, rows=[lists])
    async with InProcessTools(load_tools("calculator,finish")) as tools:
        demonstration = await demonstrate(setup, tools, setup.rows[0])
    assert "calculator" not in HERMES_LIKE.decode(demonstration.trajectory.prompt_ids)
    assert not demonstration.trajectory.calls[0].valid


async def test_a_row_with_an_environment_shows_what_that_shows() -> None:
    begins = row(extra_info={"tools_kwargs": {"environment": {"secret": 7, "below": 9}}})
    setup = setup_of(HERMES_LIKE, rows=[begins])
    async with InProcessTools([GuessEnvironment()]) as tools:
        demonstration = await demonstrate(setup, tools, setup.rows[0], "7")
    assert "below 9" in HERMES_LIKE.decode(demonstration.trajectory.prompt_ids)
    assert [call.observation for call in demonstration.trajectory.turn_calls] == ["Right!"]
    without = await demonstrate(setup, StandIn(setup), setup.rows[0])
    assert without.trajectory.fault is None


async def test_a_turn_of_one_s_own_that_holds_no_call_is_the_answer() -> None:
    demonstration = await shown(setup_of(), turn="I calculate <nothing>.")
    assert not demonstration.calls
    assert not demonstration.trajectory.calls
    assert written(demonstration, Author.MODEL) == "I calculate <nothing>.<|im_end|>"


async def test_a_row_that_uses_no_tool_makes_no_call() -> None:
    demonstration = await shown(setup_of(rows=[row(use_tool=False)]))
    assert not demonstration.trajectory.calls


async def test_a_limit_cuts_the_turn() -> None:
    demonstration = await shown(setup_of(max_action_length=5))
    assert demonstration.trajectory.stop is StopReason.MAX_ACTION_LENGTH


@pytest.mark.parametrize(
    ("context", "options"),
    [
        ("drop_thoughts", {}),
        ("window", {"context_turns": 3, "context_tokens": 4000}),
        ("summarise", {"context_tokens": 4000}),
    ],
)
async def test_the_demonstration_cuts_the_context_once(context: str, options: dict[str, int]) -> None:
    demonstration = await shown(setup_of(context=context, **options))
    trajectory = demonstration.trajectory
    assert trajectory.stop is StopReason.ANSWERED
    assert [each.reason for each in trajectory.contexts] == [context]
    assert len(trajectory.rows) == 2


@pytest.mark.parametrize("name", NATIVE)
async def test_behind_a_summary_the_user_speaks_and_no_tool(name: str) -> None:
    fmt, ends = NATIVE[name]
    options = {"mtrl_role": "tool", "context": "summarise", "context_tokens": 4000, "summary_continuation": "Go on."}
    setup = setup_of(family(name, *ends), [MADE_UP_TOOL], formats=[fmt], **options)
    demonstration = await shown(setup)
    [context] = demonstration.trajectory.contexts
    conversation = [("user", "?"), ("assistant", SUMMARY), ("user", "Go on.")]
    messages = [{"role": role, "content": text} for role, text in conversation]
    rendered = setup.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert setup.tokenizer.decode(context.tokens).endswith(rendered.rpartition(SUMMARY)[2])


@pytest.mark.parametrize("context", ["window", "summarise"])
async def test_one_turn_is_enough_to_show_a_cut(context: str) -> None:
    limits = {"window": {"context_turns": 3}, "summarise": {"context_tokens": 4000}}[context]
    trajectory = (await shown(setup_of(context=context, max_turns=1, **limits))).trajectory
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.segments[-1].text.startswith(ANSWER)
    assert len(trajectory.rows) == 2


async def test_a_turn_of_one_s_own_gets_no_thought() -> None:
    demonstration = await shown(setup_of(context="drop_thoughts"), turn="<think>\nI know it.\n</think>\n\nBye.")
    assert demonstration.trajectory.response[0].text == "<think>\nI know it.\n</think>\n\nBye.<|im_end|>"
