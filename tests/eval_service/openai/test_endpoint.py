"""The endpoint as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import pytest
from live_endpoint import CALL, COUNTER, MODEL, LiveEndpoint, live_endpoint

from eval_service.engines import watched_engine
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.http.event_stream import DONE, HEARTBEAT

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")

QUESTION = [{"role": "user", "content": "What is 13.1-3?"}]


def client_of(live: LiveEndpoint, api_key: str = "none", **options: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=api_key, **{"max_retries": 0, **options})
    live.clients.append(client)
    return client


async def post(live: LiveEndpoint, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(live.url + path, data=data, headers=headers or {}) as response,
    ):
        return response.status, await response.json()


async def until(condition: Any, seconds: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


# Answers at once


async def test_a_chat_gets_the_final_answer_with_the_call_done_inside() -> None:
    async with live_endpoint() as live:
        answer = await client_of(live).chat.completions.create(model=MODEL, messages=QUESTION)
    choice = answer.choices[0]
    assert choice.message.content == "Result=10.1"
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "answered")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL


async def test_sub_agents_answer_a_chat_and_neither_a_stream_nor_a_completion() -> None:
    def says(text: str) -> str:
        if "seven" in text:
            return "done"
        return "seven" if "count" in text else "<delegate>count</delegate>"

    options = {"subagents": True, "action_stop_tokens": ["</delegate>"]}
    async with live_endpoint(says, options=options) as live:
        client = client_of(live)
        answer = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body={"return_trajectory": True}
        )
        with pytest.raises(openai.BadRequestError, match="this model has sub-agents"):
            await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        with pytest.raises(openai.BadRequestError, match="this model has sub-agents"):
            await client.completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].message.content == "done"
    child, main = Trajectory.from_json(json.dumps(answer.choices[0].trajectory)).rows
    assert child.response_text.startswith("seven")
    assert main.model_text.startswith("<delegate>count</delegate>")


def summarising(text: str) -> str:
    """Calls once, notes what came of it, and answers; the notes are all that the answer sees."""
    if text.endswith("Write notes."):
        return "it is 10.1"
    return "Result=10.1" if "it is 10.1" in text else CALL


SUMMARISES = {"context": "summarise", "context_tokens": 1, "summary_tokens": 20, "summary_prompt": "Write notes."}


async def test_a_summary_of_the_context_is_no_part_of_a_chats_answer() -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "logprobs": True}
    async with live_endpoint(summarising, options=SUMMARISES) as live:
        client = client_of(live)
        answer = await client.chat.completions.create(**asked, extra_body={"return_trajectory": True})
        stream = await client.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        whole = await client.completions.create(model=MODEL, prompt="13.1-3? ", logprobs=1)
        with pytest.raises(openai.BadRequestError, match="context=summarise"):
            await client.completions.create(model=MODEL, prompt="x", stream=True)
    trajectory = Trajectory.from_json(json.dumps(answer.choices[0].trajectory))
    assert [row.response[-1].summary for row in trajectory.rows] == [True, False]
    assert answer.choices[0].message.content == "Result=10.1"
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content).startswith("Result=10.1")
    assert "".join(delta.content or "" for delta in deltas) == CALL + "Result=10.1"
    assert "it is 10.1" in whole.choices[0].text


async def test_usage_counts_the_tokens_of_model_and_tools_apart() -> None:
    async with live_endpoint() as live:
        answer = await client_of(live).chat.completions.create(model=MODEL, messages=QUESTION)
    written = len(CALL) + len("Result=10.1") + 1
    usage = answer.usage
    assert usage.completion_tokens == written
    assert usage.tool_tokens == len("10.1<response>")
    assert usage.tool_calls == 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens + usage.tool_tokens


async def test_the_trajectory_comes_along_when_asked_for() -> None:
    async with live_endpoint() as live:
        answer = await client_of(live).chat.completions.create(
            model=MODEL, messages=QUESTION, user="me", extra_body={"return_trajectory": True}
        )
    trajectory = Trajectory.from_json(json.dumps(answer.choices[0].trajectory))
    assert [s.author for s in trajectory.segments] == [Author.PROMPT, Author.MODEL, Author.TOOL, Author.MODEL]
    assert trajectory.model_text == CALL + "Result=10.1<|im_end|>"
    assert trajectory.calls[0].observation == "10.1<response>"
    assert trajectory.extra == {"user": "me"}
    assert trajectory.timings.total > 0
    assert sum(trajectory.response_mask) == answer.usage.completion_tokens


async def test_completions_give_all_text_behind_the_prompt() -> None:
    async with live_endpoint() as live:
        answer = await client_of(live).completions.create(model=MODEL, prompt="13.1-3? ")
    assert answer.choices[0].text == CALL + "10.1<response>Result=10.1"
    assert answer.object == "text_completion"


async def test_several_prompts_of_text_or_ids_with_several_answers_each() -> None:
    async with live_endpoint(lambda text: f"[{text[0]}]") as live:
        client = client_of(live)
        texts = await client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2)
        ids = await client.completions.create(model=MODEL, prompt=[list(b"ab"), list(b"cd")], n=2)
        one = await client.completions.create(model=MODEL, prompt=list(b"ef"))
    assert [(c.index, c.text) for c in texts.choices] == [(0, "[a]"), (1, "[a]"), (2, "[c]"), (3, "[c]")]
    assert [c.text for c in ids.choices] == [c.text for c in texts.choices]
    assert texts.usage.prompt_tokens == 4
    assert one.choices[0].text == "[e]"


async def test_sampling_reaches_the_engine_and_choices_draw_with_seeds_of_their_own() -> None:
    async with live_endpoint(lambda text: "ok") as live:
        await client_of(live).chat.completions.create(
            model=MODEL, messages=QUESTION, n=2, seed=7, temperature=0.5, top_p=0.9, extra_body={"top_k": 5}
        )
        params = live.engine.params
    assert sorted(p["seed"] for p in params) == [7, 8]
    assert all((p["temperature"], p["top_p"], p["top_k"]) == (0.5, 0.9, 5) for p in params)


async def test_max_tokens_counts_what_the_model_writes_over_all_its_turns() -> None:
    async with live_endpoint() as live:
        client = client_of(live)
        short = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=10)
        over_two = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_completion_tokens=len(CALL) + 4
        )
        to_the_call = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=len(CALL))
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == (CALL[:10], "length")
    assert over_two.choices[0].message.content == "Resu"
    assert over_two.usage.completion_tokens == len(CALL) + 4
    assert to_the_call.usage.completion_tokens == len(CALL)
    assert to_the_call.choices[0].finish_reason == "length"


async def test_a_stop_string_of_the_client_ends_the_answer_and_is_not_shown() -> None:
    async with live_endpoint() as live:
        client = client_of(live)
        at_once = await client.chat.completions.create(model=MODEL, messages=QUESTION, stop=["0.1"])
        shown = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=QUESTION, stop="0.1", stream=True
        ):
            shown += chunk.choices[0].delta.content or ""
    assert at_once.choices[0].message.content == "Result=1"
    assert at_once.choices[0].finish_reason == "stop"
    assert shown == CALL + "Result=1"


async def test_log_probs_of_a_chat_line_up_with_its_answer() -> None:
    async with live_endpoint() as live:
        client = client_of(live)
        answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2)
        bare = await client.chat.completions.create(model=MODEL, messages=QUESTION)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "Result=10.1<|im_end|>"
    assert content[0].logprob == -0.5
    assert content[0].bytes == [ord("R")]
    assert len(content[0].top_logprobs) == 2
    assert bare.choices[0].logprobs is None


async def test_log_probs_of_a_completion_are_null_on_tokens_of_tools() -> None:
    async with live_endpoint() as live:
        answer = await client_of(live).completions.create(model=MODEL, prompt="13.1-3? ", logprobs=1)
    columns = answer.choices[0].logprobs
    text = CALL + "10.1<response>" + "Result=10.1<|im_end|>"
    assert "".join(columns.tokens) == text
    assert all(text[at:].startswith(token) for at, token in zip(columns.text_offset, columns.tokens, strict=True))
    by_tool = [p is None for p in columns.token_logprobs]
    assert by_tool == [len(CALL) <= at < len(CALL) + 14 for at in columns.text_offset]


# Streams


async def chunks_of(live: LiveEndpoint, **request: Any) -> list[Any]:
    stream = await client_of(live).chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "stream": True, **request}
    )
    return [chunk async for chunk in stream]


async def test_a_stream_shows_the_models_words_the_call_and_what_the_tool_gave() -> None:
    async with live_endpoint() as live:
        chunks = await chunks_of(live, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == CALL + "Result=10.1"
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("SimpleCalculatorTool", {"input": "13.1-3"})
    ]
    messages = [message for delta in deltas for message in getattr(delta, "tool_messages", ())]
    assert messages == [{"index": 0, "role": "tool", "tool_call_id": calls[0].id, "content": "10.1<response>"}]
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.tool_calls == 1


async def test_the_clients_own_accumulator_puts_a_stream_together() -> None:
    async with (
        live_endpoint() as live,
        client_of(live).chat.completions.stream(model=MODEL, messages=QUESTION) as stream,
    ):
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.role == "assistant"
    assert message.content == CALL + "Result=10.1"
    assert len(message.tool_calls) == 1


async def test_tokens_come_while_the_model_writes() -> None:
    release = asyncio.Event()
    async with live_endpoint(lambda text: "word " * 50, pause=0.01) as live:
        stream = await client_of(live).chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        first = await anext(aiter(stream))
        release.set()
        assert live.engine.running == 1
        assert first.choices[0].delta.content
        await stream.close()


@pytest.mark.parametrize("slow", ["engine", "tool"])
async def test_a_stream_that_waits_sends_heartbeats(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here what is slow goes on only once the client has heard two of them."""
    heard: list[bytes] = []
    async with live_endpoint(heartbeat_seconds=0.02) as live:
        holder, name = (live.engine, "generate") if slow == "engine" else (live.endpoint.service.tools, "call")
        work = getattr(holder, name)

        async def waits(*args: Any, **kwargs: Any) -> Any:
            await until(lambda: heard.count(HEARTBEAT.strip()) >= 2)
            return await work(*args, **kwargs)

        monkeypatch.setattr(holder, name, waits)
        body = {"model": MODEL, "messages": QUESTION, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{live.url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                heard.append(line.strip())
        monkeypatch.undo()
        as_ever = await chunks_of(live)
        async with aiohttp.ClientSession() as session, session.get(f"{live.url}/metrics") as response:
            assert "verl_tool_eval_first_chunk_seconds_count 2.0" in await response.text()
    events = [json.loads(line[6:]) for line in heard if line.startswith(b"data: {")]
    assert [event["choices"][0]["delta"].get("content") for event in events] == [
        chunk.choices[0].delta.content for chunk in as_ever
    ]
    assert (heard[0] == HEARTBEAT.strip()) == (slow == "engine")
    assert DONE.strip() in heard


async def test_a_stream_without_include_usage_bears_the_usage_on_its_last_chunk() -> None:
    async with live_endpoint() as live:
        chunks = await chunks_of(live, n=3)
    assert all(chunk.choices for chunk in chunks)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.tool_calls == 3
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {CALL + "Result=10.1"}


@pytest.mark.parametrize("mode", [{}, {"enable_mtrl": True, "action_stop_tokens": ["<call>"]}])
async def test_a_streamed_completion_is_the_same_text_as_one_at_once(mode: dict[str, Any]) -> None:
    async with live_endpoint(options=mode) as live:
        client = client_of(live)
        whole = await client.completions.create(model=MODEL, prompt="13.1-3? ", logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="13.1-3? ", stream=True, logprobs=1)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    by_tool = "".join(c.choices[0].text for c in chunks if getattr(c.choices[0], "author", "") == "tool")
    assert "10.1<response>" in by_tool
    assert "Result" not in by_tool
    tokens = [token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens


async def test_an_observation_that_ends_the_trajectory_is_streamed_too() -> None:
    async with live_endpoint(options={"max_turns": 1, "force_finish_for_last_turn": True}) as live:
        client = client_of(live)
        whole = await client.completions.create(model=MODEL, prompt="x")
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert streamed == whole.choices[0].text == CALL + "10.1<response>"
    assert whole.choices[0].finish_reason == "length"


# Tools


async def test_tools_of_the_request_limit_which_may_be_used() -> None:
    async with live_endpoint(tools="calculator," + COUNTER) as live:
        client = client_of(live)
        none = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[])
        by_choice = await client.chat.completions.create(model=MODEL, messages=QUESTION, tool_choice="none")
        named = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
        allowed = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=named)
        with pytest.raises(openai.BadRequestError, match="unknown; known: calculator, counter") as error:
            await client.chat.completions.create(
                model=MODEL, messages=QUESTION, tools=[{"type": "function", "function": {"name": "nope"}}]
            )
    assert none.choices[0].message.content == by_choice.choices[0].message.content == CALL
    assert none.usage.tool_calls == 0
    assert allowed.choices[0].message.content == "Result=10.1"
    assert (error.value.param, error.value.code) == ("tools", "unknown_tool")


async def test_a_tool_that_the_request_does_not_name_is_not_run() -> None:
    async with live_endpoint(tools="calculator," + COUNTER) as live:
        answer = await client_of(live).chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "counter"}}],
            extra_body={"return_trajectory": True},
        )
    call = answer.choices[0].trajectory["calls"][0]
    assert not call["valid"]
    assert "10.1" not in call["observation"]


async def test_a_tag_of_a_tool_is_a_call_in_chat_mode_unless_the_request_leaves_the_tool_out() -> None:
    tag = "<counter></counter>"
    options = {"enable_mtrl": True, "action_stop_tokens": []}
    rule = lambda text: "done" if "</result>" in text else tag  # noqa: E731
    async with live_endpoint(rule, tools="calculator," + COUNTER, options=options) as live:
        create = client_of(live).chat.completions.create
        whole = await create(model=MODEL, messages=QUESTION)
        named = [{"type": "function", "function": {"name": "calculator"}}]
        left_out = await create(model=MODEL, messages=QUESTION, tools=named)
        deltas = [chunk.choices[0].delta for chunk in await chunks_of(live)]
    assert (whole.choices[0].message.content, whole.usage.tool_calls) == ("done", 1)
    assert (left_out.choices[0].message.content, left_out.usage.tool_calls) == (tag, 0)
    assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["counter"]


async def test_a_stateful_tool_keeps_its_state_over_the_turns_of_one_answer_only() -> None:
    def counts(text: str) -> str:
        asked = text.rpartition("assistant")[2].count("</counter>")
        return "<counter></counter>" if asked < 3 else "done"

    options = {"action_stop_tokens": ["</counter>"]}
    async with live_endpoint(counts, tools=COUNTER, options=options) as live:
        answer = await client_of(live).chat.completions.create(
            model=MODEL, messages=QUESTION, n=4, extra_body={"return_trajectory": True}
        )
        await until(lambda: len(live.tool_server.app.toolset.trajectories()) == 0)
    for choice in answer.choices:
        observations = [call["observation"].strip() for call in choice.trajectory["calls"]]
        assert [o[o.index(">") + 1 : o.rindex("<")].strip() for o in observations] == ["1", "2", "3"]


# What is refused


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"frequency": 1}, 400, "frequency", "unknown_parameter"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": None}, 400, "messages", "invalid_value"),
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"n": 100_000}, 400, "n", None),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"stop": ["a", ""]}, 400, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, None, "invalid_value"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format.type", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, 400, "messages.0", "invalid_value"),
    ],
)
async def test_errors_have_openais_shape(
    change: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    async with live_endpoint() as live:
        got, body = await post(live, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION} | change)
    assert got == status
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == code
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]}, "input_audio"),
        ({"content": [{"type": "video_url", "video_url": {"url": "data:"}}]}, "video_url"),
        ({"content": "a", "images": ["a.png"]}, "images"),
    ],
)
async def test_what_is_neither_text_nor_image_is_refused_by_name(message: dict[str, Any], name: str) -> None:
    async with live_endpoint() as live:
        got, body = await post(live, "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user"} | message]})
    assert got == 400
    assert f"'{name}' is not carried here" in body["error"]["message"]


async def test_a_missing_field_bad_json_a_wrong_path_and_a_wrong_method_are_told() -> None:
    async with live_endpoint(max_body_bytes=1000) as live:
        missing = await post(live, "/v1/chat/completions", {"model": MODEL})
        broken = await post(live, "/v1/chat/completions", b"{")
        a_list = await post(live, "/v1/chat/completions", b"[]")
        nowhere = await post(live, "/v1/chat", {})
        method = await post(live, "/v1/models", {})
        large = await post(live, "/v1/completions", b" " * 2000)
    assert (missing[0], missing[1]["error"]["code"]) == (400, "missing_required_parameter")
    assert broken[0] == a_list[0] == 400
    assert nowhere[0] == 404
    assert "/v1/chat/completions" in nowhere[1]["error"]["message"]
    assert method[0] == 405
    assert large[0] == 413


async def test_an_api_key_guards_all_but_health() -> None:
    async with live_endpoint(api_key="secret") as live:
        with pytest.raises(openai.AuthenticationError):
            await client_of(live, "wrong").models.list()
        assert [m.id async for m in await client_of(live, "secret").models.list()] == [MODEL]
        async with aiohttp.ClientSession() as session, session.get(f"{live.url}/health") as response:
            assert response.status == 200


async def test_a_tool_server_that_is_gone_is_an_error_and_never_an_answer() -> None:
    async with live_endpoint() as live:
        await live.tool_server.stop()
        live.tool_server.stop = _nothing  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError) as error:
            await client_of(live).chat.completions.create(model=MODEL, messages=QUESTION)
        with pytest.raises(openai.APIError, match="a tool call failed"):
            await chunks_of(live)
        async with aiohttp.ClientSession() as session, session.get(f"{live.url}/health") as response:
            report = await response.json()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"] == "1"
    assert error.value.code == "tool_unreachable"
    assert "the tool server" in report["message"]


async def _nothing() -> None:
    pass


@pytest.mark.parametrize("silent", [False, True])
async def test_an_engine_that_dies_leaves_nobody_waiting(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`silent`: as a machine that is gone; what was asked of it gets no answer, nor does what is asked from then on."""
    monkeypatch.setattr(watched_engine, "CHECK_EVERY_SECONDS", 0.01)
    async with live_endpoint(options={"max_concurrent_trajectories": 4}) as live:
        died, lives = asyncio.Event(), live.engine.generate

        async def generate(*args: Any, **kwargs: Any) -> Any:
            live.engine.running += 1
            await died.wait()
            if silent:
                await asyncio.Event().wait()
            return await lives(*args, **kwargs)

        monkeypatch.setattr(live.engine, "generate", generate)
        client = client_of(live)
        request = {"model": MODEL, "messages": QUESTION}
        waiting = [client.chat.completions.create(**request, stream=i % 2 == 0) for i in range(10)]
        asked = [asyncio.create_task(wait) for wait in waiting]
        await until(lambda: live.engine.running == 4 and live.endpoint.service.admission.inside == 10)
        live.engine.dead = True
        died.set()
        asked.append(asyncio.create_task(client.chat.completions.create(**request)))
        told = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        async with aiohttp.ClientSession() as session, session.get(f"{live.url}/health") as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert live.endpoint.service.admission.inside == 0
        live.engine.dead = False
        monkeypatch.setattr(live.engine, "generate", lives)
        assert (await client.chat.completions.create(**request)).choices[0].message.content == "Result=10.1"
    for error in told:
        assert isinstance(error, openai.InternalServerError), error
        assert (error.status_code, error.code) == (503, "engine_failed")
        assert error.response.headers["retry-after"] == "1"


# Many, and clients that leave


async def test_200_chats_at_once() -> None:
    async with live_endpoint(options={"max_concurrent_trajectories": 64}) as live:
        client = client_of(live)
        answers = await asyncio.gather(
            *(client.chat.completions.create(model=MODEL, messages=QUESTION) for _ in range(200))
        )
        assert {answer.choices[0].message.content for answer in answers} == {"Result=10.1"}
        assert live.engine.most_running <= 64
        assert live.endpoint.service.admission.inside == 0


async def test_a_full_queue_answers_503_with_retry_after() -> None:
    async with live_endpoint(
        lambda text: "x" * 40, pause=0.01, options={"max_concurrent_trajectories": 1}, max_queued=1
    ) as live:
        client = client_of(live)
        first = [asyncio.create_task(client.chat.completions.create(model=MODEL, messages=QUESTION)) for _ in range(2)]
        await until(lambda: live.endpoint.service.admission.inside == 2)
        with pytest.raises(openai.InternalServerError) as error:
            await client.chat.completions.create(model=MODEL, messages=QUESTION)
        await asyncio.gather(*first)
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_model(stream: bool) -> None:
    async with live_endpoint(lambda text: "x" * 3000, pause=0.01) as live:
        request = {"model": MODEL, "messages": QUESTION, "stream": stream}
        session = aiohttp.ClientSession()
        sending = asyncio.create_task(session.post(f"{live.url}/v1/chat/completions", json=request))
        await until(lambda: live.engine.running == 1)
        await asyncio.sleep(0.2)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await session.close()
        await until(lambda: live.engine.cancelled == 1)
        await until(lambda: live.endpoint.service.admission.inside == 0)


async def test_a_client_that_leaves_stops_the_tool_and_frees_its_state() -> None:
    options = {"action_stop_tokens": ["</counter>"]}
    async with live_endpoint(lambda text: "<counter>30</counter>", tools=COUNTER, options=options) as live:
        toolset = live.tool_server.app.toolset
        session = aiohttp.ClientSession()
        body = {"model": MODEL, "messages": QUESTION}
        sending = asyncio.create_task(session.post(f"{live.url}/v1/chat/completions", json=body))
        await until(lambda: len(toolset._running) == 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await session.close()
        await until(lambda: live.endpoint.service.admission.inside == 0)
        await until(lambda: len(toolset._running) == 0, 20.0)


async def test_a_slow_reader_slows_the_writer() -> None:
    async with live_endpoint(lambda text: "y" * 3000, max_model_len=8192) as live:
        body = {"model": MODEL, "messages": QUESTION, "stream": True, "logprobs": True, "top_logprobs": 20}
        async with (
            aiohttp.ClientSession(read_bufsize=1024) as session,
            session.post(f"{live.url}/v1/chat/completions", json=body) as response,
        ):
            await response.content.readline()
            text = await response.content.read()
    assert text.endswith(b"data: [DONE]\n\n")


async def test_a_request_beyond_its_deadline_is_stopped() -> None:
    async with live_endpoint(lambda text: "x" * 500, pause=0.01, request_timeout_seconds=0.3) as live:
        with pytest.raises(openai.InternalServerError) as error:
            await client_of(live).chat.completions.create(model=MODEL, messages=QUESTION)
        assert error.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"no answer within 0\.3 s"):
            await chunks_of(live)
        await until(lambda: live.engine.running == 0)
        assert live.engine.cancelled == 2


async def test_metrics_and_models() -> None:
    async with live_endpoint() as live:
        client = client_of(live)
        await client.chat.completions.create(model=MODEL, messages=QUESTION)
        card = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        async with aiohttp.ClientSession() as session, session.get(f"{live.url}/metrics") as response:
            text = await response.text()
    assert card.max_model_len == 4096
    assert 'verl_tool_eval_answers_total{stop="answered"} 1.0' in text
    assert 'verl_tool_eval_tokens_total{author="tool"} 14.0' in text
    assert 'verl_tool_eval_tool_calls_total{valid="true"} 1.0' in text
    assert "verl_tool_eval_running 0.0" in text


# Sessions of agents


async def test_a_session_of_an_agent_is_recorded_next_to_the_endpoints_own_answers() -> None:
    async with live_endpoint(lambda text: "Warm.", api_key="boss") as live:
        boss = {"authorization": "Bearer boss"}
        async with httpx.AsyncClient(base_url=live.url) as http:
            assert (await http.post("/sessions", json={})).status_code == 401
            opened = (await http.post("/sessions", json={}, headers=boss)).json()
            base = live.url + opened["paths"]["openai"]
            agent = openai.AsyncOpenAI(base_url=base, api_key=opened["key"], max_retries=0)
            answer = await agent.chat.completions.create(model="any", messages=QUESTION)
            await agent.close()
            assert answer.choices[0].message.content == "Warm."
            path = f"/sessions/{opened['id']}/finish"
            assert (await http.post(path, json={"reward": 1})).status_code == 401
            finished = (await http.post(path, json={"reward": 1}, headers=boss)).json()
            assert (
                await http.post("/v1/chat/completions", json={"model": MODEL, "messages": QUESTION})
            ).status_code == 401
    rollout = Trajectory.from_json(json.dumps(finished["trajectory"]))
    assert (rollout.model_text, rollout.reward) == ("Warm.<|im_end|>", 1.0)


async def open_session(live: LiveEndpoint, **options: Any) -> openai.AsyncOpenAI:
    """A client of a new session."""
    async with httpx.AsyncClient(base_url=live.url) as http:
        opened = (await http.post("/sessions", json=options)).json()
    agent = openai.AsyncOpenAI(base_url=live.url + opened["paths"]["openai"], api_key=opened["key"], max_retries=0)
    live.clients.append(agent)
    return agent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_waits_in_the_endpoints_queue_and_is_rejected_when_it_is_full(stream: bool) -> None:
    limits = {"options": {"max_concurrent_trajectories": 1}, "max_queued": 1}
    async with live_endpoint(lambda text: "x" * 100, pause=0.01, **limits) as live:
        chat = asyncio.ensure_future(client_of(live).chat.completions.create(model=MODEL, messages=QUESTION))
        await until(lambda: live.engine.running == 1)
        # Its own limit holds for sampling, not for the wait before it.
        waiting = await open_session(live, answer_seconds=2.0)
        answer = asyncio.ensure_future(waiting.chat.completions.create(model="any", messages=QUESTION))
        admission = live.endpoint.service.admission
        await until(lambda: admission.queued == 1)
        rejected = await open_session(live)
        with pytest.raises(openai.InternalServerError, match="queue is full") as error:
            await rejected.chat.completions.create(model="any", messages=QUESTION, stream=stream)
        assert error.value.status_code == 503
        assert error.value.response.headers["retry-after"] == "1"
        assert live.engine.running == 1
        assert (await answer).choices[0].message.content == (await chat).choices[0].message.content == "x" * 100
        assert live.engine.most_running == 1
        assert admission.inside == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_a_session_beyond_the_endpoints_deadline_is_stopped(stream: bool) -> None:
    async with live_endpoint(lambda text: "x" * 500, pause=0.01, request_timeout_seconds=0.3) as live:
        agent = await open_session(live)
        with pytest.raises(openai.InternalServerError, match=r"no answer within 0\.3 s") as error:
            await agent.chat.completions.create(model="any", messages=QUESTION, stream=stream)
        assert error.value.status_code == 504
        assert (live.engine.running, live.engine.cancelled, live.endpoint.service.admission.inside) == (0, 1, 0)


async def test_answers_of_sessions_are_in_the_metrics() -> None:
    async with live_endpoint(lambda text: "Warm.") as live:
        agent = await open_session(live, max_tokens=3)
        answer = await agent.chat.completions.create(model="any", messages=QUESTION)
        async with httpx.AsyncClient(base_url=live.url) as http:
            text = (await http.get("/metrics")).text
    assert answer.usage is not None
    assert f'verl_tool_eval_tokens_total{{author="prompt"}} {answer.usage.prompt_tokens:.1f}' in text
    assert 'verl_tool_eval_tokens_total{author="model"} 3.0' in text
    assert 'verl_tool_eval_answers_total{stop="max_response_length"} 1.0' in text
