"""Which turns of an agent are one chain, and in which row each is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agent_sessions import WritingGenerator, ask, make_session, say
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import TemplateTokenizer
from template_families import QWEN, TOOL, hermes

from verl_tool.agent_loop.trajectory import DELEGATED, Trajectory
from verl_tool.gateway.conversation import AgentMessage, AgentRequest, Role, ToolCall
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.session import AgentSession, ContextLengthError
from verl_tool.gateway.session_tree import FORKED, RESTARTED, ModelTurn

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
TASK = say("user", "How warm is it?")
TOOLS = (TOOL,)


def writes(*texts: str, **options: Any) -> AgentSession:
    return make_session(TOKENIZER, [f"{text}<|im_end|>" for text in texts], **options)


def call(city: str) -> str:
    return hermes([("", city)]).removesuffix("<|im_end|>")


def check_trained_once(session: AgentSession, rollout: Trajectory) -> None:
    """Each row is what the model was fed and wrote, and no token is trained twice."""
    turns = session.tree.turns
    generator = session.model.generator
    assert isinstance(generator, WritingGenerator)
    fed = {tuple(prompt) for prompt in generator.prompts}
    trained = 0
    for row in rollout.rows:
        ids, mask = row.prompt_ids + row.response_ids, [0] * len(row.prompt_ids) + row.response_mask
        trained += sum(mask)
        starts = [i for i, m in enumerate(mask) if m and not mask[i - 1]]
        assert all(tuple(ids[:start]) in fed for start in starts)
    assert trained == sum(len(turn.generation.token_ids) for turn in turns if session.tree.is_trained(turn))


async def test_a_history_that_is_appended_to_is_one_row() -> None:
    session = writes(call("Oslo"), call("Rome"), "Warm.")
    messages = [say("system", "Brief."), TASK]
    for observation in ("7", "20"):
        turn = await ask(session, *messages, tools=TOOLS)
        messages += [turn.answer.message, say("tool", observation, answers=0)]
    await ask(session, *messages, tools=TOOLS)
    rollout = await session.finish(1.0)
    check_trained_once(session, rollout)
    assert len(rollout.rows) == 1
    assert rollout.num_turns == 3
    assert rollout.reward == 1.0
    assert rollout.response_log_probs is not None


CHANGES = {
    "arguments_spaced": lambda m: replace(m, calls=tuple(replace(c, arguments='{"city" : "Oslo"}') for c in m.calls)),
    "arguments_escaped": lambda m: replace(
        m, calls=tuple(replace(c, arguments='{"city":"\\u004fslo"}') for c in m.calls)
    ),
    "other_ids": lambda m: replace(m, calls=tuple(replace(c, id="x") for c in m.calls)),
    "white_space": lambda m: replace(m, parts=say("user", " Wait. ").parts),
    "thoughts_dropped": lambda m: replace(m, thoughts=""),
    "default_added": lambda m: replace(
        m, calls=tuple(replace(c, arguments='{"city": "Oslo", "unit": "C"}') for c in m.calls)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_an_answer_that_comes_back_in_another_form_is_the_same(change: str) -> None:
    parameters = {"properties": {"city": {}, "unit": {"default": "C"}}}
    tools = ({"type": "function", "function": {"name": "weather", "parameters": parameters}},)
    session = writes(f"<think>\nHm.\n</think>\n\nWait.\n{call('Oslo')}", "Warm.", policy={"edited": "branch"})
    first = await ask(session, TASK, tools=tools)
    assert (first.answer.thoughts, first.answer.text) == ("Hm.", "Wait.")
    second = await ask(session, TASK, CHANGES[change](first.answer.message), say("tool", "7", answers=0), tools=tools)
    assert second.parent is first
    rollout = await session.finish()
    check_trained_once(session, rollout)
    assert len(rollout.rows) == 1


async def test_dropped_thoughts_make_a_branch_if_the_model_shall_see_what_is_sent() -> None:
    session = writes("<think>\nHm.\n</think>\n\nWarm.", "Hot.", policy={"thoughts": "sent", "edited": "branch"})
    first = await ask(session, TASK)
    second = await ask(session, TASK, replace(first.answer.message, thoughts=""), say("user", "Rome?"))
    assert second.parent is None
    assert "Hm." not in TOKENIZER.decode(second.context_ids)


@pytest.mark.parametrize(("edited", "adopted"), [("adopt", True), ("branch", False)])
async def test_an_answer_that_the_agent_edited_is_known_by_its_call_id(edited: str, adopted: bool) -> None:
    session = writes(call("Oslo"), "Warm.", policy={"edited": edited})
    first = await ask(session, TASK, tools=TOOLS)
    made = first.answer.calls[0]
    back = AgentMessage(Role.ASSISTANT, calls=(ToolCall("invalid", '{"error": "unreadable"}', made.id),))
    second = await ask(session, TASK, back, say("tool", "no", answers=0), tools=TOOLS)
    assert (second.parent is first, second.edited) == (adopted, adopted)
    rollout = await session.finish()
    check_trained_once(session, rollout)
    assert len(rollout.rows) == (1 if adopted else 2)


async def test_a_handle_is_worth_nothing_behind_another_conversation() -> None:
    session = writes(call("Oslo"), "Warm.")
    first = await ask(session, TASK, tools=TOOLS)
    forged = AgentMessage(Role.ASSISTANT, calls=(ToolCall("weather", "{}", first.answer.calls[0].id),))
    second = await ask(session, say("user", "Another task."), forged, say("tool", "7", answers=0), tools=TOOLS)
    assert second.parent is None


async def test_compaction_is_a_row_of_its_own_and_its_summary_is_trained() -> None:
    session = writes(call("Oslo"), "Summary: in Oslo it is 7 degrees.", "Warm.")
    first = await ask(session, TASK, tools=TOOLS)
    seen = (TASK, first.answer.message, say("tool", "7", answers=0))
    summary = await ask(session, *seen, say("user", "Summarise."), tools=TOOLS)
    await ask(session, say("user", f"So far: {summary.answer.text}"), tools=TOOLS)
    rollout = await session.finish()
    check_trained_once(session, rollout)
    assert [len([s for s in row.response if s.generated]) for row in rollout.rows] == [2, 1]
    assert [context.reason for context in rollout.contexts] == [RESTARTED]


async def test_a_title_is_not_trained_and_a_summary_without_tools_is() -> None:
    session = writes("Weather talk", call("Oslo"), "Summary: in Oslo it is 7 degrees.", "Warm.")
    await ask(session, say("system", "Write a title."), TASK)
    await ask(session, TASK, tools=TOOLS)
    summary = await ask(session, say("system", "Summarise."), TASK)
    await ask(session, say("user", summary.answer.text), tools=TOOLS)
    rollout = await session.finish()
    assert [session.tree.is_trained(turn) for turn in session.tree.turns] == [False, True, True, True]
    check_trained_once(session, rollout)


async def test_sub_agents_have_rows_of_their_own_even_with_the_same_prompt() -> None:
    session = writes(call("Oslo"), call("Rome"), call("Rome"), "a", "b", "Done.")
    main = await ask(session, TASK, tools=TOOLS)
    task = say("user", "Look it up.")
    starts = [await ask(session, task, tools=TOOLS, agent_id=each) for each in ("one", "two")]
    for each, start in zip(("one", "two"), starts, strict=True):
        turn = await ask(session, task, start.answer.message, say("tool", "7", answers=0), tools=TOOLS, agent_id=each)
        assert turn.parent is start
    await ask(session, TASK, main.answer.message, say("tool", "7", answers=0), tools=TOOLS)
    rollout = await session.finish()
    check_trained_once(session, rollout)
    assert [context.reason for context in rollout.contexts] == [DELEGATED] * 2
    assert [{s.agent for s in row.response} for row in rollout.rows] == [{1}, {2}, {0}]


async def test_an_answer_that_was_sampled_again_is_trained_only_on_request() -> None:
    for dropped, trained in (("mask", [False, True]), ("train", [True, True])):
        session = writes("One.", "Two.", policy={"dropped": dropped})
        await ask(session, TASK)
        await ask(session, TASK)
        rollout = await session.finish()
        assert [session.tree.is_trained(turn) for turn in session.tree.turns] == trained
        check_trained_once(session, rollout)


async def test_a_shared_beginning_is_trained_once() -> None:
    session = writes(call("Oslo"), "Warm.", "Cold, since it is only seven degrees.")
    first = await ask(session, TASK, tools=TOOLS)
    for observation in ("7", "6"):
        await ask(session, TASK, first.answer.message, say("tool", observation, answers=0), tools=TOOLS)
    rollout = await session.finish()
    check_trained_once(session, rollout)
    assert [context.reason for context in rollout.contexts] == [FORKED]
    assert [row.num_turns for row in rollout.rows] == [2, 1] or [row.num_turns for row in rollout.rows] == [1, 2]


async def test_what_the_agent_did_not_receive_is_not_trained() -> None:
    session = writes("One.")
    turn = await ask(session, TASK, deliver=False)
    rollout = await session.finish()
    assert not session.tree.is_trained(turn)
    assert sum(rollout.response_mask) == 0


async def test_a_conversation_above_the_context_is_rejected_in_words_that_agents_know() -> None:
    session = writes("One.")
    session.model = replace(session.model, max_model_len=20)
    with pytest.raises(ContextLengthError, match="context_length_exceeded"):
        await ask(session, say("user", "x" * 100))


moves = st.lists(st.sampled_from(["tool", "user", "again", "restart", "fork", "lose"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(moves)
async def test_no_token_is_trained_twice_whatever_the_agent_does(steps: list[str]) -> None:
    session = writes(*(f"{n}. {call(f'city {n}')}" for n in range(len(steps) + 1)))
    messages: list[AgentMessage] = [TASK]
    turn: ModelTurn = await ask(session, *messages, tools=TOOLS)
    for number, step in enumerate(steps):
        if step in ("tool", "user", "lose"):
            messages += [turn.answer.message, say("tool", f"{number}", answers=0)]
            messages += [say("user", "Go on.")] if step == "user" else []
        elif step == "restart":
            messages = [say("user", f"Once more, {number}.")]
        elif step == "fork":
            messages = messages[:1]
        turn = await ask(session, *messages, tools=TOOLS, deliver=step != "lose")
    check_trained_once(session, await session.finish())


async def test_the_attempt_that_is_received_is_trained_and_not_one_that_ends_later() -> None:
    session = writes("One.", "Two.")
    request = AgentRequest("test", (TASK,))
    first = await session.open_answer(request)
    await first.task
    second = await session.open_answer(request)
    await second.task
    session.close_answer(second, delivered=True)
    session.close_answer(first, delivered=False)
    assert [session.tree.is_trained(turn) for turn in session.tree.turns] == [False, True]


async def test_thoughts_that_are_dropped_are_not_adopted_if_the_model_shall_see_what_is_sent() -> None:
    session = writes("<think>\nHm.\n</think>\n\nWarm.", "Hot.", policy={"thoughts": "sent"})
    first = await ask(session, TASK)
    second = await ask(session, TASK, replace(first.answer.message, thoughts=""), say("user", "Rome?"))
    assert second.parent is None


async def test_an_id_of_another_answer_adopts_nothing() -> None:
    session = writes(call("Oslo"), call("Rome"), "Warm.")
    await ask(session, TASK, tools=TOOLS)
    other = await ask(session, say("user", "Another task."), tools=TOOLS)
    mixed = AgentMessage(Role.ASSISTANT, calls=(ToolCall("weather", "{}", other.answer.calls[0].id),))
    third = await ask(session, TASK, mixed, say("tool", "7", answers=0), tools=TOOLS)
    assert third.parent is None


async def test_words_that_may_stand_for_several_answers_adopt_none() -> None:
    session = writes("One.", "Two.", "Three.")
    for _ in range(2):
        await ask(session, TASK)
    third = await ask(session, TASK, say("assistant", "Other words."), say("user", "And?"))
    assert third.parent is None
    assert "Other words." in TOKENIZER.decode(third.context_ids)


async def test_an_answer_that_is_named_and_not_known_is_rejected() -> None:
    with pytest.raises(RequestError, match="previous_response_id: 'x'"):
        await ask(writes("One."), TASK, previous="x")


async def test_rejected_requests_are_not_remembered() -> None:
    session = writes("One.")
    session.model = replace(session.model, max_model_len=40)
    for number in range(20):
        with pytest.raises(ContextLengthError):
            await ask(session, say("user", f"{number}" * 100), agent_id=f"{number}")
    assert await session.count_tokens(AgentRequest("test", (say("user", "x"),))) > 0
    assert (session.tree._matched, session.tree.turns) == ({}, [])


async def test_a_long_history_is_matched_from_where_it_was_left() -> None:
    """The hash of what came before is not made again: its messages are compared with those of the last request."""
    session = writes(*[call("Oslo")] * 6)
    messages = [TASK]
    for number in range(6):
        turn = await ask(session, *messages, tools=TOOLS)
        messages += [turn.answer.message, say("tool", f"{number}", answers=0)]
    rollout = await session.finish()
    check_trained_once(session, rollout)
    assert len(rollout.rows) == 1
