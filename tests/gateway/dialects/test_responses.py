"""The Responses API: what agents send is read, and what is written the official client reads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from agent_recordings import recordings
from hypothesis import given
from hypothesis import strategies as st
from openai_answers import client_of, following_requests, make_answer, recorded_requests

from verl_tool.content.parts import TextPart
from verl_tool.gateway.conversation import AgentMessage, Finish, Role, ToolCall
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.dialects.responses import ResponsesDialect

RESPONSES = ResponsesDialect()
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def parse(*items: Any, headers: dict[str, str] | None = None, **fields: Any):
    return RESPONSES.parse_request({"input": list(items or [USER]), **fields}, headers or {})


def test_every_recorded_response_is_read():
    seen = recorded_requests("responses")
    assert len(seen) == 159
    for name, each in seen:
        request = RESPONSES.parse_request(each.body, each.headers)
        turns = [message.role for message in request.messages]
        assert all(pair != (Role.ASSISTANT, Role.ASSISTANT) for pair in itertools.pairwise(turns)), name
        results = [message for message in request.messages if message.role is Role.TOOL]
        assert all((message.answers is None) == (request.previous is not None) for message in results), name
        assert (request.agent_id != "") == (each.kind == "sub"), name


APPENDING = [
    *("codex/basic", "codex/basic-key", "codexnet/basic", "codex/sub", "codex/badjson", "codex/badtool", "codex/min"),
    *("oaiagents-resp/basic", "oaiagents-resp/key", "oaiagents-respstream/basic", "lc-resp/basic", "lc-resp/min"),
    *("piresp/basic", "raw-resp/basic", "raw-resp/min"),
]


@pytest.mark.parametrize("name", APPENDING)
def test_an_answer_of_a_response_comes_back_the_same(name):
    pairs = list(following_requests(RESPONSES, name))
    assert len(pairs) >= 2
    assert [sampled == returned for sampled, returned in pairs] == [True] * len(pairs)


def test_concurrent_sub_agents_of_codex_have_an_id_each():
    ids = [RESPONSES.parse_request(each.body, each.headers).agent_id for each in recordings()["codex/sub2"]]
    assert len(set(ids)) == 3
    assert ids.count("") == 4


def test_a_response_that_goes_on_names_the_answer_before():
    first, second = (RESPONSES.parse_request(each.body, {}) for each in recordings()["raw-prev/basic"][:2])
    assert first.previous is None
    assert second.previous == recordings()["raw-prev/basic"][0].response["id"].removeprefix("resp_")
    (result,) = second.messages
    assert (result.role, result.answers, result.call_id) == (Role.TOOL, None, "call_4e4545379f7b4ff69c5f")
    request = parse(previous_response_id="resp_a1b2", instructions="be brief", store=False)
    assert (request.previous, request.instructions, len(request.messages)) == ("a1b2", "be brief", 1)
    assert request.settings == {"store": False}


def test_fields_of_a_response():
    body = {"input": "hi", "instructions": "be brief", "model": "m", "stream": True, "max_output_tokens": 9}
    request = RESPONSES.parse_request({**body, "temperature": 0, "invented": 1}, {})
    assert [(m.role, m.text) for m in request.messages] == [(Role.SYSTEM, "be brief"), (Role.USER, "hi")]
    assert (request.model, request.stream, request.max_tokens, request.instructions) == ("m", True, 9, "")
    assert request.settings == {"temperature": 0, "invented": 1}


def test_items_of_a_turn_are_one_message():
    request = parse(
        *(USER, {"type": "reasoning", "id": "rs_a1", "summary": [{"text": "why"}], "encrypted_content": "enc_a1"}),
        {"type": "message", "role": "assistant", "id": "msg_a1", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "function_call", "id": "fc_a1_0", "call_id": "c0", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "function_call_output", "call_id": "c0", "output": "ok"},
    )
    _, turn, first, second = request.messages
    calls = (ToolCall("f", "{}", "c0"), ToolCall("patch", "*** x", "c1", is_text=True))
    assert turn == AgentMessage(Role.ASSISTANT, (TextPart("so"),), "why", calls, handles=("a1", "a1", "a1"))
    assert (first.text, first.answers, second.text, second.answers) == ("done", 1, "ok", 0)
    content = [{"type": "reasoning_text", "text": "all of it"}]
    assert parse({"type": "reasoning", "content": content, "summary": []}).messages[0].thoughts == "all of it"


TOOLS = [
    {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False},
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "namespace", "name": "multi", "tools": [{"type": "function", "name": n} for n in ("spawn", "wait")]},
]


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[::-1]])
async def test_tools_of_a_namespace_have_names_of_their_own(tools):
    request = parse(
        {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "multi", "arguments": "{}"}, tools=tools
    )
    assert {t["function"]["name"] for t in request.tools} == {"spawn", "patch", "multi__spawn", "wait"}
    assert (request.text_tools, request.namespaces) == ({"patch"}, {"multi__spawn": "multi", "wait": "multi"})
    assert request.messages[0].calls[0].name == "multi__spawn"
    answer = make_answer(calls=tuple(ToolCall(name, "{}") for name in ("multi__spawn", "wait", "spawn")))
    output = RESPONSES.render_answer(answer, request)["output"]
    assert [(i["name"], i.get("namespace")) for i in output] == [("spawn", "multi"), ("wait", "multi"), ("spawn", None)]
    (echoed,) = parse(*output, tools=tools).messages
    assert echoed.digest(b"", with_thoughts=True) == answer.message.digest(b"", with_thoughts=True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input:"),
        ({"input": []}, "input:"),
        ({"input": 3}, "input:"),
        ({"input": ["hi"]}, "input[0]:"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role:"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type:"),
        ({"input": [{"type": 4}]}, "input[0].type:"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type:"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type:"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y"}]}]},
            "input[0].content[0].image_url:",
        ),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name:"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": [1]}]}, "input[0].arguments:"),
        ({"input": "hi", "tools": "all"}, "tools:"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name:"),
        ({"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].name:"),
        ({"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": TOOLS[3:]}]}, "tools[0].tools[0].type:"),
        ({"input": "hi", "instructions": ["x"]}, "instructions:"),
        ({"input": "hi", "previous_response_id": 1}, "previous_response_id:"),
        ({"input": "hi", "max_output_tokens": 1.5}, "max_output_tokens:"),
    ],
)
def test_an_error_names_the_field_of_a_response(body, field):
    with pytest.raises(RequestError) as raised:
        RESPONSES.parse_request(body, {})
    assert str(raised.value).startswith(field)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
kinds = st.sampled_from(["reasoning", "function_call", "custom_tool_call", "x_output", "message", "namespace", "text"])
fields = ("content", "role", "summary", "arguments", "input", "output", "id", "call_id", "name", "namespace", "tools")
near_values = st.recursive(
    json_values | kinds,
    lambda inner: st.fixed_dictionaries({"type": kinds}, optional=dict.fromkeys(fields, inner)) | st.lists(inner),
    max_leaves=10,
)
bodies = json_values.filter(lambda value: isinstance(value, dict)) | st.fixed_dictionaries(
    {"input": st.lists(near_values, max_size=3) | near_values},
    optional=dict.fromkeys(("tools", "instructions", "stream", "model", "previous_response_id"), near_values),
)


@given(bodies)
def test_any_object_is_a_response_or_an_error_of_the_request(body):
    try:
        request = RESPONSES.parse_request(body, {})
    except RequestError:
        return
    assert request.messages
    digest = b""
    for message in request.messages:
        digest = message.digest(digest, with_thoughts=True)


CALLS = (
    ToolCall("f", '{"x": 1}', "c0"),
    ToolCall("g", '{"x": ', "c1", error="not JSON"),
    ToolCall("patch", "*** x", "", is_text=True),
)
ANSWERS = {
    "text": make_answer("hello"),
    "all": make_answer("hello", "why", CALLS),
    "calls": make_answer(calls=CALLS),
    "cut": make_answer("hel", finish=Finish.LENGTH),
    "thoughts": make_answer("", "why", finish=Finish.LENGTH),
    "empty": make_answer(),
    "surrogate": make_answer("half \ud83d"),
}


def check_response(read: Any, kind: str) -> None:
    answer = ANSWERS[kind]
    cut = answer.finish is Finish.LENGTH
    assert (read.id, read.object, read.created_at, read.model) == ("resp_a1b2", "response", 7, "m")
    assert (read.status, read.output_text) == ("incomplete" if cut else "completed", answer.text)
    assert (read.incomplete_details.reason if cut else read.incomplete_details) == (
        "max_output_tokens" if cut else None
    )
    assert (read.usage.total_tokens, read.usage.output_tokens_details.reasoning_tokens) == (17, 0)
    (echoed,) = parse(*(item.model_dump() for item in read.output)).messages
    assert echoed.digest(b"", with_thoughts=True) == answer.message.digest(b"", with_thoughts=True)
    assert set(echoed.handles) == {"a1b2"}
    assert [call.id for call in echoed.calls] == [c.id or "call_a1b2_2" for c in answer.calls]


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_client_of_openai_reads_a_response(kind):
    check_response(await client_of(RESPONSES, ANSWERS[kind]).responses.create(model="m", input="hi"), kind)


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_client_of_openai_reads_a_streamed_response(kind):
    answer, client = ANSWERS[kind], client_of(RESPONSES, ANSWERS[kind])
    events = [e async for e in await client.responses.create(model="m", input="hi", stream=True)]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{'incomplete' if answer.finish is Finish.LENGTH else 'completed'}"
    check_response(events[-1].response, kind)
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == events[-1].response.output
    deltas = {e.type: "" for e in events}
    for e in events:
        deltas[e.type] += e.delta if hasattr(e, "delta") else ""
    assert deltas.get("response.output_text.delta", "") == answer.text
    assert deltas.get("response.reasoning_summary_text.delta", "") == answer.thoughts
    functions = "".join(call.arguments for call in answer.calls if not call.is_text)
    assert deltas.get("response.function_call_arguments.delta", "") == functions
    assert deltas.get("response.custom_tool_call_input.delta", "") == ("*** x" if answer.calls else "")


@pytest.mark.parametrize("kind", sorted(set(ANSWERS) - {"cut", "thoughts"}))
async def test_the_client_of_openai_collects_a_streamed_response(kind):
    async with client_of(RESPONSES, ANSWERS[kind]).responses.stream(model="m", input="hi") as stream:
        async for _ in stream:
            pass
        check_response(await stream.get_final_response(), kind)


def test_an_error_ends_a_streamed_response():
    event = RESPONSES.render_error_event(503, "later").decode()
    assert event.startswith("event: response.failed\ndata: ")
    assert '"error":{"code":"server_error","message":"later"}' in event
