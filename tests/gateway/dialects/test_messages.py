"""Anthropic's Messages API: recorded requests of real agents, and Anthropic's own client as the reader of answers."""

import base64
import contextlib
import itertools
import json

import anthropic
import httpx2
import pytest
from agent_recordings import recordings
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.content.parts import ImagePart, TextPart
from verl_tool.gateway.conversation import AgentMessage, AgentRequest, Finish, ModelAnswer, Role, ToolCall
from verl_tool.gateway.dialects.base import Dialect, RequestError
from verl_tool.gateway.dialects.messages import MessagesDialect, render_token_count
from verl_tool.gateway.schema_defaults import drop_defaults, find_defaults

DIALECT: Dialect = MessagesDialect()
REQUESTS = {
    name: [each for each in requests if each.dialect == "messages"]
    for name, requests in recordings().items()
    if any(each.dialect == "messages" for each in requests)
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def parse(messages: list, **fields) -> AgentRequest:
    return DIALECT.parse_request({"model": "m", "max_tokens": 9, "messages": messages, **fields}, {})


def parse_user(*blocks: dict) -> tuple[AgentMessage, ...]:
    return parse([{"role": "user", "content": list(blocks)}]).messages


def make_answer(text="", thoughts="", calls=(), finish=Finish.STOP, stop_string=None) -> ModelAnswer:
    return ModelAnswer("a-1", "m", text, thoughts, tuple(calls), finish, 11, 7, 0, stop_string)


REQUEST = parse([{"role": "user", "content": "hi"}])


class TestRecordings:
    @pytest.mark.parametrize("name", REQUESTS)
    def test_every_request_is_read(self, name):
        for recorded in REQUESTS[name]:
            assert DIALECT.parse_request(recorded.body, recorded.headers).messages

    def test_claude_code_is_read(self):
        request = DIALECT.parse_request(REQUESTS["claude/basic"][2].body, REQUESTS["claude/basic"][2].headers)
        assert [message.role.value for message in request.messages] == ["system", "user", "system", "assistant", "tool"]
        assert request.messages[0].text.startswith("You are a Claude agent"), "the billing header is left out"
        assert request.messages[4].answers == 0
        assert len(request.tools) == 25
        assert {"temperature", "tool_choice"}.isdisjoint(request.settings)
        assert {"thinking", "metadata", "betas", "output_config"} <= set(request.settings)
        assert (request.model, request.stream, request.max_tokens) == ("claude-opus-4-8", True, 64000)

    @pytest.mark.parametrize("name", sorted(set(REQUESTS) - {"claude/min", "raw-msgstream/min"}))
    def test_an_answer_comes_back_as_it_was(self, name):
        """So do the messages before it, thoughts included. Where answers have no ids, Claude Code merges them."""
        threads: dict[tuple, list] = {}
        for recorded in REQUESTS[name]:
            request = DIALECT.parse_request(recorded.body, recorded.headers)
            if recorded.kind in ("main", "sub"):
                threads.setdefault((recorded.kind, request.agent_id), []).append((recorded, request))
        compared = 0
        for thread in threads.values():
            for (recorded, request), (_, later) in itertools.pairwise(thread):
                count = len(request.messages)
                if not is_delivered(recorded) or len(later.messages) <= count:
                    continue
                assert digest(later.messages[:count], later) == digest(request.messages, request)
                sent = response_message(recorded)
                if recorded.op in ("badjson", "lengthtool"):
                    sent = AgentMessage(Role.ASSISTANT, calls=(ToolCall("Read", '{"path": "app.p'),))
                assert digest([later.messages[count]], later) == digest([sent], request), recorded.op
                assert [call.id for call in later.messages[count].calls] == [
                    block["id"] for block in recorded.response["content"] if block["type"] == "tool_use"
                ]
                assert later.messages[count].handles == tuple(
                    block["signature"] for block in recorded.response["content"] if block["type"] == "thinking"
                )
                compared += 1
        assert compared >= 1

    def test_parallel_sub_agents_differ(self):
        ids = [
            (recorded.kind, DIALECT.parse_request(recorded.body, recorded.headers).agent_id)
            for recorded in REQUESTS["claude/sub2"]
        ]
        assert {agent_id for kind, agent_id in ids if kind != "sub"} == {""}
        assert len({agent_id for kind, agent_id in ids if kind == "sub"} - {""}) == 2

    def test_tools_to_be_loaded_later_are_not_in_the_prompt(self):
        recorded = REQUESTS["claudesdk/basic"][1]
        request = DIALECT.parse_request(recorded.body, recorded.headers)
        assert len(recorded.body["tools"]) == 12
        assert len(request.tools) == 11
        assert [tool["function"]["name"] for tool in request.deferred_tools] == ["DeferredToolPlaceholder"]


def is_delivered(recorded) -> bool:
    """Whether the client got the whole answer, and takes it into the conversation."""
    return recorded.status == 200 and not recorded.op.startswith(("cut", "hang")) and bool(recorded.response["content"])


def response_message(recorded) -> AgentMessage:
    (message,) = parse([{"role": "assistant", "content": recorded.response["content"]}]).messages
    return message


def digest(messages, request: AgentRequest) -> bytes:
    key, schemas = b"", find_defaults(request.tools)
    for message in messages:
        key = drop_defaults(message, schemas).digest(key, with_thoughts=True)
    return key


FIELDS = st.sampled_from(
    [
        *("model", "messages", "system", "tools", "role", "content", "type", "text", "name", "input", "id", "data"),
        *("tool_use_id", "source", "is_error", "thinking", "signature", "input_schema", "defer_loading", "tool"),
        *("max_tokens", "stop_sequences", "stream"),
    ]
)
WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"),
        *("base64", "custom", "tool_reference", "tool_addition"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=25,
)
TEXTS = st.text(max_size=5) | VALUES
BLOCKS = st.fixed_dictionaries(
    {"type": WORDS, "text": TEXTS, "id": TEXTS, "name": TEXTS, "tool_use_id": TEXTS, "data": TEXTS},
    optional={"input": VALUES | st.just({}), "content": TEXTS, "thinking": TEXTS, "source": VALUES, "is_error": VALUES},
)
ROLES = st.sampled_from(["user", "assistant", "system"]) | VALUES
MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": TEXTS | st.lists(BLOCKS, max_size=3)})
BODIES = st.dictionaries(FIELDS, VALUES) | st.fixed_dictionaries({"messages": st.lists(MESSAGES)})
SCALARS = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text()
ARGUMENTS = st.text() | st.recursive(SCALARS, st.lists).map(lambda value: json.dumps({"a": value}))


class TestReading:
    def test_results_and_text_keep_their_order(self):
        calls = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {"n": i}} for i in range(2)]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
        request = parse(
            [
                {"role": "assistant", "content": [{"type": "text", "text": "go"}, *calls]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "b"}, image]},
                        {"type": "text", "text": "hurry", "cache_control": {"type": "ephemeral"}},
                        {"type": "tool_result", "tool_use_id": "c0", "content": "a", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "unknown"},
                    ],
                },
            ]
        )
        turn, second, text, first, stray = request.messages
        assert turn.calls == (ToolCall("f", '{"n": 0}', "c0"), ToolCall("f", '{"n": 1}', "c1"))
        assert (second.role, second.answers, second.text, second.is_error) == (Role.TOOL, 1, "b", False)
        assert isinstance(second.parts[1], ImagePart)
        assert (text.role, text.parts) == (Role.USER, (TextPart("hurry"),))
        assert (first.answers, first.text, first.is_error) == (0, "a", True)
        assert (stray.role, stray.answers, stray.parts) == (Role.TOOL, None, ())

    def test_a_turn_with_thoughts_and_blocks_of_servers(self):
        (turn,) = parse(
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "d"},
                        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "x", "content": []},
                        {"type": "text", "text": "so"},
                    ],
                }
            ]
        ).messages
        assert turn == AgentMessage(Role.ASSISTANT, (TextPart("so"),), "hm", handles=("s", "d"))

    def test_tools(self):
        custom = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}}
        search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
        options = {"tool_choice": {"type": "any"}, "stop_sequences": ["E"]}
        request = parse([{"role": "user", "content": "x"}], tools=[custom, search], **options)
        function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        assert request.tools == ({"type": "function", "function": function},)
        assert request.settings == {"tool_choice": {"type": "any"}, "server_tools": ["web_search_20250305"]}
        assert request.stop == ("E",)

    @pytest.mark.parametrize(
        "content",
        [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "late"}]},
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
        ],
    )
    def test_a_deferred_tool_is_described_where_it_is_referred_to(self, content):
        late = {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True}
        request = parse([{"role": "user", "content": [content]}], tools=[late])
        assert request.tools == ()
        assert json.loads(request.messages[0].text) == request.deferred_tools[0]["function"]
        search = {"type": "tool_search_tool_regex_20251119", "name": "search"}
        assert len(parse([{"role": "user", "content": "x"}], tools=[late, search]).tools) == 1, "nobody could find it"

    @pytest.mark.parametrize(
        ("field", "body"),
        [
            ("messages", {}),
            ("messages", {"messages": []}),
            ("messages", {"messages": [{"role": "user", "content": []}]}),
            ("messages.0.role", {"messages": [{"role": "tool", "content": "x"}]}),
            ("messages.0.content", {"messages": [{"role": "user"}]}),
            ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
            ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}),
            (
                "messages.0.content.0.source.type",
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
            ),
            ("max_tokens", {"max_tokens": 0, "messages": [{"role": "user", "content": "x"}]}),
            ("stop_sequences", {"stop_sequences": [""], "messages": [{"role": "user", "content": "x"}]}),
            ("system.0.type", {"system": [{"type": "image"}], "messages": [{"role": "user", "content": "x"}]}),
            ("tools.0.input_schema", {"tools": [{"name": "f"}], "messages": [{"role": "user", "content": "x"}]}),
            ("tools.0.type", {"tools": [{"type": "bash_20250124"}], "messages": [{"role": "user", "content": "x"}]}),
            ("tools.0.type", {"tools": [{"type": "function"}], "messages": [{"role": "user", "content": "x"}]}),
        ],
    )
    def test_what_is_wrong_is_named(self, field, body):
        with pytest.raises(RequestError, match=rf"^{field} "):
            DIALECT.parse_request(body, {})

    @pytest.mark.parametrize("data", ["%%%", base64.b64encode(b"RIFF....WAVE").decode(), ""])
    def test_only_images_are_images(self, data):
        source = {"type": "base64", "media_type": "image/png", "data": data}
        with pytest.raises(RequestError, match=r"^messages\.0\.content\.0\.source: "):
            parse_user({"type": "image", "source": source})

    @given(BODIES)
    def test_any_json_is_read_or_rejected(self, body):
        with contextlib.suppress(RequestError):
            assert DIALECT.parse_request(body, {}).messages


ANSWERS = {
    "text": make_answer("\nDone.  \n"),
    "thoughts and calls": make_answer(
        "Let me", "Hm.\n", [ToolCall("f", '{"a" : "\\u00e9"}', "t1"), ToolCall("g", "{}", "t2")], Finish.CALLS
    ),
    "broken call": make_answer("", "", [ToolCall("f", '{"path": "app.p', "t1", error="broken")], Finish.CALLS),
    "no object": make_answer("", "", [ToolCall("f", "[1]", "t1", error="a list")], Finish.CALLS),
    "length": make_answer("cut", "", (), Finish.LENGTH),
    "stop string": make_answer("a", "", (), Finish.STOP, "END"),
    "empty": make_answer(),
}
STOP_REASONS = {
    **dict.fromkeys(("text", "empty"), "end_turn"),
    **dict.fromkeys(("thoughts and calls", "broken call", "no object"), "tool_use"),
    "length": "max_tokens",
    "stop string": "stop_sequence",
}


def serve(respond) -> anthropic.AsyncAnthropic:
    """Anthropic's client, answered by `respond`."""
    client = httpx2.AsyncClient(transport=httpx2.MockTransport(respond))
    return anthropic.AsyncAnthropic(api_key="k", base_url="http://gateway", max_retries=0, http_client=client)


async def ask(answer: ModelAnswer, stream: bool) -> anthropic.types.Message:
    """What Anthropic's client makes of an answer."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == DIALECT.path
        asked = DIALECT.parse_request(json.loads(request.content), dict(request.headers))
        assert asked.stream == stream
        if not stream:
            return httpx2.Response(200, json=DIALECT.render_answer(answer, asked))
        events = b"".join([DIALECT.ping, DIALECT.ping, *DIALECT.stream_answer(answer, asked)])
        return httpx2.Response(200, content=events, headers={"content-type": "text/event-stream"})

    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    async with serve(respond) as client:
        if not stream:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            return await events.get_final_message()


class TestWriting:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("name", ANSWERS)
    async def test_the_client_reads_an_answer_and_sends_it_back(self, name, stream):
        answer = ANSWERS[name]
        message = await ask(answer, stream)
        assert (message.id, message.model, message.role) == ("msg_a-1", "m", "assistant")
        assert message.stop_reason == STOP_REASONS[name]
        assert message.stop_sequence == answer.stop_string
        assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
        if name == "empty":
            assert message.content == []
            return
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        (back,) = parse([{"role": "assistant", "content": blocks}]).messages
        assert back.digest(b"", with_thoughts=True) == answer.message.digest(b"", with_thoughts=True)
        assert [call.id for call in back.calls] == [call.id for call in answer.calls]
        assert back.handles == (("a-1",) if answer.thoughts else ())

    @pytest.mark.parametrize("stream", [False, True])
    async def test_broken_arguments_are_wrapped_in_an_object(self, stream):
        (block,) = (await ask(ANSWERS["broken call"], stream)).content
        assert block.input == {"__unparsedToolInput": {"raw": '{"path": "app.p', "len": 15}}

    @given(ARGUMENTS)
    def test_any_arguments_come_back(self, arguments):
        answer = make_answer(calls=[ToolCall("f", arguments, "t")], finish=Finish.CALLS)
        content = json.loads(json.dumps(DIALECT.render_answer(answer, REQUEST)["content"]))
        (back,) = parse([{"role": "assistant", "content": content}]).messages
        assert back.digest(b"", with_thoughts=True) == answer.message.digest(b"", with_thoughts=True)

    def test_an_agent_that_disables_thinking_gets_none(self):
        request = parse([{"role": "user", "content": "hi"}], thinking={"type": "disabled"})
        content = DIALECT.render_answer(make_answer("so", "hm"), request)["content"]
        assert content == [{"type": "text", "text": "so"}]

    @pytest.mark.parametrize(
        ("status", "kind", "error"),
        [
            (400, "invalid_request_error", anthropic.BadRequestError),
            (401, "authentication_error", anthropic.AuthenticationError),
            (404, "not_found_error", anthropic.NotFoundError),
            (409, "invalid_request_error", anthropic.ConflictError),
            (413, "request_too_large", anthropic.RequestTooLargeError),
            (429, "rate_limit_error", anthropic.RateLimitError),
            (500, "api_error", anthropic.InternalServerError),
            (503, "overloaded_error", anthropic.ServiceUnavailableError),
        ],
    )
    async def test_the_client_raises_for_an_error(self, status, kind, error):
        body = DIALECT.render_error(status, "no")
        assert body == {"type": "error", "error": {"type": kind, "message": "no"}}
        async with serve(lambda _: httpx2.Response(status, json=body)) as client:
            with pytest.raises(error, match="no"):
                await client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])

    async def test_the_client_raises_for_an_error_in_a_stream(self):
        events = DIALECT.ping + MessagesDialect().render_error_event(500, "engine lost")
        response = httpx2.Response(200, content=events, headers={"content-type": "text/event-stream"})
        async with serve(lambda _: response) as client:
            with pytest.raises(anthropic.APIStatusError, match="engine lost"):
                async with client.messages.stream(model="m", max_tokens=1, messages=[]) as stream:
                    await stream.get_final_message()

    async def test_the_client_counts_tokens(self):
        async with serve(lambda _: httpx2.Response(200, json=render_token_count(5))) as client:
            counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}])
        assert counted.input_tokens == 5
