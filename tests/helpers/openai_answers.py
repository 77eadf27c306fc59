"""Answers of a dialect as the official client reads them, and recorded answers as a gateway would have made them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from agent_recordings import RecordedRequest, recordings
from openai import AsyncOpenAI

from verl_tool.content.parts import TextPart
from verl_tool.gateway.conversation import AgentMessage, AgentRequest, Finish, ModelAnswer, Role, ToolCall
from verl_tool.gateway.dialects.base import Dialect

_JSON = {"content-type": "application/json"}


def make_answer(text: str = "", thoughts: str = "", calls: tuple[ToolCall, ...] = (), **fields: Any) -> ModelAnswer:
    finish = Finish.CALLS if calls else Finish.STOP
    defaults = {"id": "a1b2", "model": "m", "finish": finish, "prompt_tokens": 12, "completion_tokens": 5, "created": 7}
    return ModelAnswer(text=text, thoughts=thoughts, calls=calls, **{**defaults, **fields})


def client_of(dialect: Dialect, answer: ModelAnswer, requests: list[AgentRequest] | None = None) -> AsyncOpenAI:
    """Make a client of a server that always answers with this. The parsed requests are appended to `requests`."""

    def respond(http: httpx.Request) -> httpx.Response:
        assert http.url.path == dialect.path
        request = dialect.parse_request(json.loads(http.content), dict(http.headers))
        if requests is not None:
            requests.append(request)
        if not request.stream:
            return httpx.Response(200, content=json.dumps(dialect.render_answer(answer, request)), headers=_JSON)
        events = dialect.ping + b"".join(dialect.stream_answer(answer, request))
        return httpx.Response(200, content=events, headers={"content-type": "text/event-stream"})

    http: Any = httpx.AsyncClient(transport=httpx.MockTransport(respond))
    return AsyncOpenAI(api_key="k", base_url="http://gateway/v1", http_client=http)


def recorded_requests(dialect: str) -> list[tuple[str, RecordedRequest]]:
    """Return all requests in this dialect, each with the name of its recording."""
    return [(name, each) for name, run in recordings().items() for each in run if each.dialect == dialect]


def recorded_message(response: Mapping[str, Any]) -> AgentMessage:
    """Return the model's turn in a recorded answer of either API."""
    if "choices" in response:
        message = response["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        text = message.get("content") or ""
    else:
        items = response["output"]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return AgentMessage(Role.ASSISTANT, (TextPart(text),), calls=tuple(ToolCall(*call) for call in calls))


def chained_digest(messages: tuple[AgentMessage, ...]) -> bytes:
    digest = b""
    for message in messages:
        digest = message.digest(digest, with_thoughts=False)
    return digest


def following_requests(dialect: Dialect, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Return for each request of a recording that continues an earlier one: the digest up to and including the answer,
    as sampled and as it came back. Sub-agents are left out."""
    answered: list[tuple[tuple[AgentMessage, ...], AgentMessage]] = []
    for each in recordings()[name]:
        if each.kind != "main":
            continue
        messages = dialect.parse_request(each.body, each.headers).messages
        if answered:
            before, answer = answered[-1]
            yield chained_digest((*before, answer)), chained_digest(messages[: len(before) + 1])
        answered.append((messages, recorded_message(each.response)))
