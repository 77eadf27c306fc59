"""Chat completions: what agents send is read, and what is written the official client reads."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_answers import client_of, following_requests, make_answer, recorded_requests
from PIL import Image

from verl_tool.content.parts import ImagePart, TextPart
from verl_tool.gateway.conversation import AgentMessage, Finish, Role, ToolCall
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.dialects.chat import ChatDialect

CHAT = ChatDialect()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def parse(*messages: Any, headers: dict[str, str] | None = None, **fields: Any):
    return CHAT.parse_request({"messages": list(messages or [USER]), **fields}, headers or {})


def data_uri(kind: str = "image/png", data: bytes | None = None) -> str:
    if data is None:
        file = io.BytesIO()
        Image.new("RGB", (4, 3)).save(file, "PNG")
        data = file.getvalue()
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_every_recorded_chat_is_read():
    seen = recorded_requests("chat")
    assert len(seen) == 350
    for name, each in seen:
        request = CHAT.parse_request(each.body, each.headers)
        assert len(request.messages) == len(each.body["messages"]), name
        assert len(request.tools) == len(each.body.get("tools") or []), name
        assert all(m.answers is not None for m in request.messages if m.role is Role.TOOL) or "smol" in name, name
        assert request.agent_id == ""


APPENDING = [
    *("qwen/basic", "qwen/basic-key", "qwennet/basic", "pi/basic", "pi/basic-key", "pinet/basic", "raw-chat/basic"),
    *("raw-chat/key", "raw-chat/min", "lc-chat/basic", "lc-chat/key", "lc-chat/min", "oaiagents-chat/basic"),
    *("oaiagents-chatstream/basic", "pi/badtool", "qwen/badtool"),
]


@pytest.mark.parametrize("name", APPENDING)
def test_an_answer_of_a_chat_comes_back_the_same(name):
    pairs = list(following_requests(CHAT, name))
    assert len(pairs) >= 2
    assert [sampled == returned for sampled, returned in pairs] == [True] * len(pairs)


def test_the_answers_that_mini_keeps_come_back_the_same():
    same = [sampled == returned for sampled, returned in following_requests(CHAT, "mini/basic")]
    assert same.count(True) == 5
    assert len(same) == 7


def test_fields_of_a_chat():
    request = parse(
        *(USER, {"role": "developer", "content": [{"type": "text", "text": "be brief"}]}),
        **{"model": "m", "stream": True, "max_tokens": 9, "max_completion_tokens": 7.0, "stop": "END", "n": 1},
        **{"temperature": 0.5, "invented": {"a": 1}, "tools": [TOOL]},
    )
    assert (request.model, request.stream, request.max_tokens, request.stop) == ("m", True, 7, ("END",))
    assert request.settings == {"temperature": 0.5, "invented": {"a": 1}}
    assert request.messages[1] == AgentMessage(Role.SYSTEM, (TextPart("be brief"),))
    assert request.tools[0]["function"] == {"name": "bash", "description": "", "parameters": {"type": "object"}}
    assert parse(max_tokens=3, stop=["a", "b"]).stop == ("a", "b")


def test_turns_of_an_assistant_in_a_chat():
    calls = [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** x"}},
    ]
    request = parse(
        *(USER, {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": calls}),
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
        *({"role": "tool", "tool_call_id": "zz", "content": ""}, {"role": "assistant", "content": ""}),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "hm"},
        *({"role": "assistant", "refusal": "never"}, {"role": "assistant"}),
    )
    _, turn, first, second, empty, refusal, other, absent = request.messages
    assert turn.calls == (ToolCall("f", '{"x": 1}', "c0"), ToolCall("patch", "*** x", "c1", is_text=True))
    assert (turn.thoughts, turn.parts) == ("why", ())
    assert (first.answers, first.text, first.call_id) == (1, "ok", "c1")
    assert (second.answers, second.parts, second.call_id) == (None, (), "zz")
    assert (empty.parts, refusal.text, refusal.thoughts, other.text, absent.parts) == ((), "no", "hm", "never", ())


def test_images_of_a_chat_are_data_uris():
    part = {"type": "image_url", "image_url": {"url": data_uri()}}
    (message,) = parse({"role": "user", "content": [{"type": "text", "text": "see"}, part]}).messages
    assert message.text == "see"
    assert isinstance(message.parts[1], ImagePart)
    assert message.parts[1].width == 4


def test_a_custom_tool_of_a_chat_is_a_function_with_one_text():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
    tools = [{"type": "custom", "custom": {"name": "patch", "format": grammar}}, {"type": "web_search"}]
    request = parse(tools=tools)
    assert request.text_tools == {"patch"}
    assert len(request.tools) == 1
    assert request.tools[0]["function"]["description"] == "The input follows this grammar (lark):\nstart: X"
    assert list(request.tools[0]["function"]["parameters"]["properties"]) == ["input"]


def test_threads_of_opencode_have_different_agent_ids():
    assert parse(headers={"x-session-id": "s"}).agent_id == ""
    ids = {parse(headers={"x-session-id": s, "x-parent-session-id": "s"}).agent_id for s in ("a", "b")}
    assert len(ids) == 2
    assert "" not in ids


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [USER], "n": 2}, "n:"),
        ({}, "messages:"),
        ({"messages": []}, "messages:"),
        ({"messages": "hi"}, "messages:"),
        ({"messages": [USER, "hi"]}, "messages[1]:"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role:"),
        ({"messages": [{"content": "x"}]}, "messages[0].role:"),
        (user(3), "messages[0].content:"),
        (user([{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0].type:"),
        (user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]), "messages[0].content[0].image_url:"),
        (user([{"type": "image_url"}]), "messages[0].content[0].image_url:"),
        (
            user([{"type": "image_url", "image_url": data_uri("audio/wav", b"RIFF0000WAVE")}]),
            "messages[0].content[0].image_url:",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio:"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls:"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function:"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name:",
        ),
        ({"messages": [USER], "tools": {}}, "tools:"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function:"),
        ({"messages": [USER], "tools": [{"function": {"description": "x"}}]}, "tools[0].function.name:"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens:"),
        ({"messages": [USER], "max_completion_tokens": "many"}, "max_completion_tokens:"),
        ({"messages": [USER], "stop": [1]}, "stop:"),
        ({"messages": [USER], "stream": "yes"}, "stream:"),
        ({"messages": [USER], "model": 5}, "model:"),
    ],
)
def test_an_error_names_the_field_of_a_chat(body, field):
    with pytest.raises(RequestError) as raised:
        CHAT.parse_request(body, {})
    assert str(raised.value).startswith(field)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
any_value = json_values | st.sampled_from(["function", "custom", "text", "image_url", "assistant", "tool", "user", "f"])
field_names = [
    *("role", "content", "type", "text", "name", "arguments", "input", "id", "tool_call_id", "function", "custom"),
    *("refusal", "reasoning", "image_url", "parameters", "description"),
]
near_values = st.recursive(
    any_value,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(field_names), inner, max_size=4),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "tool", "user"])},
    optional={
        **dict.fromkeys(("content", "tool_call_id", "reasoning_content", "refusal", "audio"), near_values),
        "tool_calls": st.lists(near_values, max_size=2) | near_values,
    },
)
bodies = json_values.filter(lambda value: isinstance(value, dict)) | st.fixed_dictionaries(
    {"messages": st.lists(messages | near_values, max_size=3) | near_values},
    optional=dict.fromkeys(("tools", "n", "stop", "stream", "model", "max_tokens"), near_values),
)


@given(bodies)
def test_any_object_is_a_chat_or_an_error_of_the_request(body):
    try:
        request = CHAT.parse_request(body, {})
    except RequestError:
        return
    assert request.messages
    digest = b""
    for message in request.messages:
        digest = message.digest(digest, with_thoughts=True)


CALLS = (ToolCall("f", '{"x": 1}', "c0"), ToolCall("g", '{"x": ', "c1", error="not JSON"))
ANSWERS = {
    "text": make_answer("hello"),
    "all": make_answer("hello", "why", CALLS),
    "calls": make_answer(calls=CALLS),
    "cut": make_answer("hel", finish=Finish.LENGTH),
    "empty": make_answer(),
    "surrogate": make_answer("half \ud83d"),
}
REASONS = {"text": "stop", "all": "tool_calls", "calls": "tool_calls", "cut": "length", "empty": "stop"}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_client_of_openai_reads_a_chat(kind):
    answer = ANSWERS[kind]
    read = await client_of(CHAT, answer).chat.completions.create(model="m", messages=[USER])
    (choice,) = read.choices
    assert (read.id, read.object, read.created, read.model) == ("chatcmpl-a1b2", "chat.completion", 7, "m")
    assert choice.finish_reason == REASONS.get(kind, "stop")
    assert (choice.message.content or "") == answer.text
    assert getattr(choice.message, "reasoning_content", "") == answer.thoughts
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [c.arguments for c in answer.calls]
    assert (read.usage.prompt_tokens, read.usage.total_tokens) == (12, 17)
    assert read.usage.completion_tokens_details.reasoning_tokens == 0
    echoed = parse(USER, choice.message.model_dump()).messages[1]
    assert echoed.digest(b"", with_thoughts=True) == answer.message.digest(b"", with_thoughts=True)


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_client_of_openai_reads_a_streamed_chat(kind):
    answer = ANSWERS[kind]
    client = client_of(CHAT, answer)
    options = {"model": "m", "messages": [USER], "stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(**options) as stream:
        read = await stream_result(stream) if kind != "cut" else None
    if read is not None:
        message = read.choices[0].message
        assert (message.content or "", read.choices[0].finish_reason) == (answer.text, REASONS.get(kind, "stop"))
        assert [c.function.arguments for c in message.tool_calls or []] == [c.arguments for c in answer.calls]
        assert [c.id for c in message.tool_calls or []] == [c.id for c in answer.calls]
    chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", "") for c in chunks[:-1]) == answer.thoughts
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == answer.text
    assert chunks[-2].choices[0].finish_reason == REASONS.get(kind, "stop")
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 17)


async def stream_result(stream: Any) -> Any:
    async for _ in stream:
        pass
    return await stream.get_final_completion()


async def test_usage_is_streamed_only_on_request():
    stream = await client_of(CHAT, ANSWERS["text"]).chat.completions.create(model="m", messages=[USER], stream=True)
    assert [chunk.usage async for chunk in stream] == [None] * 3


async def test_the_client_of_openai_reads_a_custom_call_of_a_chat():
    answer = make_answer(calls=(ToolCall("patch", "*** x", is_text=True),))
    read = await client_of(CHAT, answer).chat.completions.create(model="m", messages=[USER])
    (call,) = read.choices[0].message.tool_calls
    assert (call.type, call.custom.input, call.id) == ("custom", "*** x", "call_a1b2_0")
    assert parse(USER, read.choices[0].message.model_dump()).messages[1].calls[0].is_text


def test_an_error_of_a_chat_is_an_object():
    assert json.loads(json.dumps(CHAT.render_error(400, "n: no")))["error"]["type"] == "invalid_request_error"
    assert CHAT.render_error(503, "later")["error"]["type"] == "server_error"


def test_an_error_ends_a_streamed_chat():
    assert json.loads(CHAT.render_error_event(503, "later").removeprefix(b"data: "))["error"]["message"] == "later"
