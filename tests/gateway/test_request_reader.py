"""A session's requests are read the same whether or not an earlier one had a part of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from agent_recordings import recordings
from hypothesis import given, settings
from hypothesis import strategies as st
from template_families import TOOL

from verl_tool.errors import VerlToolError
from verl_tool.gateway.conversation import AgentRequest
from verl_tool.gateway.dialects.base import Dialect, RequestError
from verl_tool.gateway.gateway_app import DIALECTS
from verl_tool.gateway.request_reader import RequestReader
from verl_tool.util.json_text import BadJsonError

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
texts = st.sampled_from(["", "a", "<think>", "7"])
ids = st.sampled_from(["", "x", "y"])
arguments = st.sampled_from([{}, {"a": 1}, {"a": True}, {"a": 1.0}, {"__unparsedToolInput": "{"}])
as_text = arguments.map(json.dumps)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields)


def of_type(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return objects(type=st.just(kind), **fields)


calls = of_type("function", id=ids, function=objects(name=st.just("weather"), arguments=as_text))
use = of_type("tool_use", id=ids, name=st.just("weather"), input=arguments)
result = of_type("tool_result", tool_use_id=ids, content=texts, is_error=st.booleans())
reference = of_type(
    "tool_result", tool_use_id=ids, content=st.just([{"type": "tool_reference", "tool_name": "weather"}])
)
text_block = of_type("text", text=texts)
ITEMS: dict[str, st.SearchStrategy[Any]] = {
    "chat": st.one_of(
        objects(role=st.sampled_from(["system", "user", "developer", "wrong"]), content=texts),
        objects(role=st.just("assistant"), content=texts, tool_calls=st.lists(calls, max_size=2)),
        objects(role=st.just("tool"), tool_call_id=ids, content=texts),
    ),
    "messages": st.one_of(
        objects(role=st.just("user"), content=st.lists(st.one_of(text_block, result, reference), max_size=3)),
        objects(role=st.just("assistant"), content=st.lists(st.one_of(text_block, use), max_size=2)),
    ),
    "responses": st.one_of(
        objects(role=st.sampled_from(["user", "assistant"]), content=texts),
        of_type("reasoning", id=ids, summary=st.lists(of_type("summary_text", text=texts), max_size=1)),
        of_type("function_call", id=ids, call_id=ids, name=st.just("weather"), arguments=as_text),
        of_type("function_call_output", call_id=ids, output=texts),
    ),
}
TOOLS: dict[str, list[list[dict[str, Any]]]] = {
    "chat": [[], [TOOL]],
    "messages": [[{"name": "weather", "input_schema": {"n": n}, "defer_loading": n > 1}] for n in range(3)],
    "responses": [
        [{"type": "function", "name": "weather"}],
        [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "weather"}]}],
    ],
}


def read(dialect: Dialect, body: bytes, reader: RequestReader) -> AgentRequest | str:
    try:
        return reader.read(body, dialect, {})
    except VerlToolError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", list(ITEMS))
def test_a_history_that_grows_shrinks_or_changes_is_read_as_if_it_were_new(name: str, data: st.DataObject) -> None:
    dialect, reader, items = BY_NAME[name], RequestReader(), []
    for _ in range(6):
        items = items[: data.draw(st.integers(0, len(items)))] + data.draw(st.lists(ITEMS[name], max_size=3))
        body: dict[str, Any] = {
            "model": "m",
            dialect.history_field: items,
            "tools": data.draw(st.sampled_from(TOOLS[name])),
        }
        body |= data.draw(st.sampled_from([{}, {"system": "s"}, {"instructions": "i"}]))
        encoded = json.dumps(body).encode()
        assert read(dialect, encoded, reader) == read(dialect, encoded, RequestReader())


@pytest.mark.parametrize("name", recordings())
def test_what_agents_sent_is_read_as_if_it_were_new(name: str) -> None:
    reader = RequestReader()
    for recorded in recordings()[name]:
        dialect = BY_NAME[recorded.dialect]
        body = json.dumps(recorded.body).encode()
        fresh = dialect.parse_request(recorded.body, recorded.headers)
        assert reader.read(body, dialect, recorded.headers) == fresh


def test_what_was_read_is_not_read_again() -> None:
    dialect, reader = BY_NAME["chat"], RequestReader()
    messages = [{"role": "user", "content": f"{n}"} for n in range(9)]

    def send(count: int, **fields: Any) -> AgentRequest:
        body = {"messages": messages[:count], "tools": [TOOL], **fields}
        return reader.read(json.dumps(body).encode(), dialect, {})

    first = send(5)
    second = send(9, stream=True)
    assert all(x is y for x, y in zip(first.messages, second.messages, strict=False))
    assert second.tools is first.tools
    assert second == replace(first, messages=second.messages, stream=True)
    for other in range(20):
        reader.read(json.dumps({"messages": [{"role": "user", "content": f"other {other}"}]}).encode(), dialect, {})
    assert len(reader._histories) <= 8


BAD = {
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "me"}]}': "messages[1].role",
    b'{"messages": "x"}': "messages: must be a list",
    b'{"model": "m"}': "messages: missing",
    b"[1]": "it must be an object",
    b'{"messages": [{"role": "user", "content": nope}]}': "not JSON",
    b'{"messages": [' + b"[" * 100 + b"]" * 100 + b"]}": "nested too deeply",
    b'{"messages": [' + b"0," * 200_000 + b"0]}": "more than 100000 values",
}


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_a_request_that_cannot_be_read_says_where_and_leaves_nothing(body: bytes) -> None:
    reader = RequestReader()
    with pytest.raises((BadJsonError, RequestError)) as caught:
        reader.read(body, BY_NAME["chat"], {})
    assert BAD[body] in str(caught.value)
    assert not reader._histories


def test_nan_and_half_of_a_surrogate_pair_are_read_as_everywhere() -> None:
    text = '{"messages": [{"role": "user", "content": "a\\ud800b"}], "top_p": NaN}'
    for body in (text, text.replace("NaN", "1")):
        request = RequestReader().read(body.encode(), BY_NAME["chat"], {})
        assert request.messages[0].text == "a\N{REPLACEMENT CHARACTER}b"
