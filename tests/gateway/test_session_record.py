"""What a record tells of an agent's session."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from agent_sessions import ask, make_session, say
from real_templates import TemplateTokenizer
from template_families import QWEN, TOOL, hermes

from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.gateway import session_record
from verl_tool.gateway.conversation import AgentMessage, Role, ToolCall
from verl_tool.gateway.session import AgentSession
from verl_tool.gateway.session_record import SESSION

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
TASK, TOOLS = say("user", "How warm is it?"), (TOOL,)
CALL = hermes([("", "Oslo")]).removesuffix("<|im_end|>")


def writes(*texts: str) -> AgentSession:
    return make_session(TOKENIZER, [f"{text}<|im_end|>" for text in texts], max_tokens=99)


async def busy_session() -> AgentSession:
    """A title, a call that comes back changed, an answer that is sampled again, a sub-agent, and one that nobody
    received."""
    session = writes("A title", CALL, "First.", "Second.", "Sub.", "Lost.")
    await ask(session, say("user", "Name this."))
    first = await ask(session, TASK, tools=TOOLS)
    made = first.answer.calls[0]
    back = AgentMessage(Role.ASSISTANT, calls=(ToolCall("invalid", "{}", made.id),))
    messages = TASK, back, say("tool", "7", answers=0)
    for _ in range(2):
        await ask(session, *messages, tools=TOOLS)
    await ask(session, say("user", "Count."), tools=TOOLS, agent_id="counter" * 50)
    await ask(session, say("user", "Anybody?"), tools=TOOLS, deliver=False)
    return session


async def test_the_record_describes_each_answer() -> None:
    record = await (await busy_session()).finish()
    described = Trajectory.from_json(record.to_json()).extra[SESSION]
    assert described["policy"] == {"thoughts": "keep", "edited": "adopt", "dropped": "mask"}
    assert (described["max_tokens"], described["requests"], described["rejected"]) == (99, 6, [])
    answers = described["answers"]
    assert [answer["parent"] for answer in answers] == [None, None, 1, 1, None, None]
    assert [answer.get("unused") for answer in answers] == ["auxiliary", None, "dropped", None, None, "undelivered"]
    assert [answer.get("edited", False) for answer in answers] == [False, True, False, False, False, False]
    assert [answer["agent"] for answer in answers] == [0, 0, 0, 0, 1, 0]
    assert described["agents"] == [("counter" * 50)[:100]]
    assert answers[1]["calls"] == ["weather"]
    assert answers[2]["text"] == "First."
    for answer in answers:
        if "segment" in answer:
            segment = record.segments[answer["segment"]]
            assert (segment.author, len(segment.tokens)) == (Author.MODEL, answer["tokens"])
            assert segment.agent == answer["agent"]
    texts = [record.segments[answers[number]["segment"]].text for number in (1, 3, 4)]
    assert texts == [f"{text}<|im_end|>" for text in (CALL, "Second.", "Sub.")]


async def test_segments_have_the_text_of_their_tokens() -> None:
    record = await (await busy_session()).finish()
    assert all(segment.text == TOKENIZER.decode(list(segment.tokens)) for segment in record.segments)
    assert len(record.timings.turns) == record.num_turns
    assert 0 < sum(record.timings.turns) <= record.timings.generate


async def test_foreign_answers_and_retries_are_counted() -> None:
    session = writes("Yes.", "No.")
    turn = await ask(session, TASK, say("assistant", "Who knows?"), say("user", "You."), deliver=False)
    again = await ask(session, TASK, say("assistant", "Who knows?"), say("user", "You."))
    assert turn is again
    await ask(session, TASK)
    answers = (await session.finish()).extra[SESSION]["answers"]
    assert [(answer.get("foreign"), answer.get("retries")) for answer in answers] == [(1, 1), (None, None)]


async def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_record, "MAX_ANSWERS", 2)
    session = writes("x" * 5000, "y" * 5000, "z")
    for _ in range(3):
        await ask(session, TASK)
    session.rejections.extend("no " * 1000 for _ in range(100))
    described = (await session.finish()).extra[SESSION]
    assert (len(described["answers"]), described["more_answers"]) == (2, 1)
    assert len(json.dumps(described)) < 5000


def test_a_record_of_an_earlier_version_opens() -> None:
    old = Trajectory.from_json(
        '{"trajectory_id": "t", "segments": [{"author": "prompt", "tokens": [1]}], "stop": "answered", '
        '"extra": {"agent_program": {"exit_code": 0, "output": "", "files": {}, "seconds": 1.0}, "step": 1}}'
    )
    assert SESSION not in old.extra
    assert replace(old, extra=old.sampled_extra).extra == {"agent_program": old.extra["agent_program"]}
