"""The way to the endpoint: who may go it, and what is told of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from live_endpoint import CALL, MODEL, live_endpoint
from stand_in import begin, event, stand_in
from viewer_server import in_a_thread, viewer

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError
from verl_tool.viewer import endpoint_proxy
from verl_tool.viewer.endpoint_proxy import KEY_VARIABLE, MAX_BODY_BYTES, MAX_STREAMS, EndpointProxy

pytestmark = pytest.mark.slow

KEY = "sk-s3cret"
ORDER = {"model": MODEL, "messages": [{"role": "user", "content": "What is 13.1-3?"}], "return_trajectory": True}


def headers_for(url, **others):
    usual = {"origin": url, "content-type": "application/json", "sec-fetch-site": "same-origin"}
    given = usual | {name.replace("_", "-"): value for name, value in others.items()}
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def asked(url, body=None, **headers):
    """The answer to a conversation, whose body is still to be read."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(ORDER if body is None else body).encode()
    connection.request("POST", "/api/chat", data, headers_for(url, **headers))
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def events(answer):
    lines = answer.read().decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def error_of(url):
    """What the stream of an answer tells that has failed."""
    with asked(url) as answer:
        assert answer.status == 200
        return events(answer)[-1]["error"]["message"]


def get(url, path):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, str(answer.getheaders()), answer.read()


def becomes(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


@contextmanager
def viewer_of(tmp_path, chat, **options):
    """The viewer of an endpoint that answers as `chat` does."""
    models = options.pop("models", None)
    with (
        in_a_thread(stand_in(chat, models)) as endpoint,
        viewer(tmp_path, endpoint=EndpointProxy(endpoint, **options)) as url,
    ):
        yield url


@contextmanager
def viewer_of_model(tmp_path, key=None, **options):
    """The URL of a viewer, and the real endpoint behind it."""
    with (
        in_a_thread(live_endpoint(api_key=key, **options)) as live,
        viewer(tmp_path, endpoint=EndpointProxy(f"{live.url}/v1/", key)) as url,
    ):
        yield url, live


def test_an_answer_of_a_real_endpoint_comes_through_as_it_is_streamed(tmp_path):
    with viewer_of_model(tmp_path, KEY) as (url, live):
        told = json.loads(get(url, "/api/endpoint")[2])
        models = [{"name": MODEL, "trajectories": True}]
        assert told == {"url": f"{live.url}/v1", "models": models, "error": None}
        with asked(url) as answer:
            assert answer.getheader("content-type").startswith("text/event-stream")
            assert "default-src 'none'" in answer.getheader("content-security-policy")
            choices = [entry["choices"][0] for entry in events(answer)]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == f"{CALL}Result=10.1"
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == [
        "SimpleCalculatorTool"
    ]
    assert [m["content"] for delta in deltas for m in delta.get("tool_messages", ())] == ["10.1<response>"]
    trajectory = Trajectory.from_json(json.dumps(choices[-1]["trajectory"]))
    assert len(trajectory.timings.turns) == trajectory.num_turns == 2


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({"origin": None}, 403, "forbidden_origin"),
        ({"origin": "null"}, 403, "forbidden_host"),
        ({"origin": "http://evil.example"}, 403, "forbidden_host"),
        ({"origin": "http://127.0.0.1:1"}, 403, "forbidden_host"),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403, "forbidden_host"),
        ({"sec_fetch_site": "cross-site"}, 403, "forbidden_origin"),
        ({"sec_fetch_site": "same-site"}, 403, "forbidden_origin"),
        ({"sec_fetch_site": "none"}, 403, "forbidden_origin"),
        ({"content_type": None}, 415, "unsupported_media_type"),
        ({"content_type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content_type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content_encoding": "gzip"}, 415, "unsupported_encoding"),
        ({"content_length": str(MAX_BODY_BYTES + 1)}, 413, "body_too_large"),
    ],
)
def test_what_is_not_from_the_viewer_s_own_page_is_refused(tmp_path, headers, status, kind):
    reached = []

    async def chat(request):
        reached.append(request)
        return web.Response()

    with viewer_of(tmp_path, chat) as url, asked(url, **headers) as answer:
        assert (answer.status, json.loads(answer.read())["error"]["type"]) == (status, kind)
    assert not reached


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        b'{"model": "toy", "messages": []}',
        {**ORDER, "url": "http://127.0.0.1:1/v1"},
        {**ORDER, "stream": False},
        {**ORDER, "messages": [{"role": "tool", "content": "4"}]},
        {**ORDER, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {**ORDER, "temperature": -1},
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path, body):
    with viewer(tmp_path, endpoint=EndpointProxy("http://127.0.0.1:9/v1")) as url, asked(url, body) as answer:
        assert answer.status == 400
        assert "no conversation" in json.loads(answer.read())["error"]["message"]


def test_a_body_that_grows_too_large_is_refused(tmp_path):
    with viewer(tmp_path, endpoint=EndpointProxy("http://127.0.0.1:9/v1")) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        parts = (b" " * (1 << 18) for _ in range(6))
        connection.request("POST", "/api/chat", parts, headers_for(url), encode_chunked=True)
        assert connection.getresponse().status == 413


def test_only_posts_are_taken_and_only_where_there_is_an_endpoint(tmp_path):
    with viewer(tmp_path) as url:
        assert get(url, "/api/chat")[0] == 405
        assert json.loads(get(url, "/api/endpoint")[2])["url"] is None
        with asked(url) as answer:
            assert answer.status == 404
            assert "--endpoint" in json.loads(answer.read())["error"]["message"]


def test_the_key_reaches_the_endpoint_and_nobody_else(tmp_path):
    keys = []

    async def chat(request):
        keys.append(request.headers["authorization"])
        response = await begin(request)
        await response.write(event({"content": "hi"}, finish_reason="stop"))
        return response

    with viewer_of(tmp_path, chat, api_key=KEY) as url:
        with asked(url) as answer:
            told = [str(answer.getheaders()), answer.read().decode()]
        for path in ("/", "/static/live.js", "/api/endpoint", "/api/runs"):
            told += map(str, get(url, path))
    assert keys == [f"Bearer {KEY}"]
    assert not any(KEY in one for one in told)


def test_a_redirect_leads_nowhere(tmp_path):
    reached = []

    async def other(request):
        reached.append(request)
        return web.Response()

    with in_a_thread(stand_in(other, other)) as elsewhere:

        async def chat(request):
            raise web.HTTPTemporaryRedirect(f"{elsewhere}/chat/completions")

        with viewer_of(tmp_path, chat) as url:
            assert "answered with status 307" in error_of(url)
    assert not reached


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"{}", f"start the viewer with it in {KEY_VARIABLE}"),
        (404, b"<html>", "answered with status 404; the address of an eval endpoint ends in /v1"),
        (400, b'{"error": {"message": "the prompt is too long"}}', "the endpoint refuses: the prompt is too long"),
        (503, b'{"error": {"message": "the queue is full"}}', "the endpoint failed: the queue is full"),
        (200, b"{}", "and no stream; is it an OpenAI API?"),
        (400, b'{"a": ' + b"[" * 20000 + b"]" * 20000 + b"}", "answered with status 400"),
    ],
)
def test_refusals_of_the_endpoint_are_told(tmp_path, status, body, words):
    async def chat(request):
        return web.Response(status=status, body=body, content_type="application/json")

    with viewer_of(tmp_path, chat) as url:
        assert words in error_of(url)


def test_a_stream_that_breaks_within_an_event_is_told(tmp_path):
    async def chat(request):
        response = await begin(request)
        await response.write(b'data: {"choices": [{"del')
        request.transport.abort()
        return response

    with viewer_of(tmp_path, chat) as url, asked(url) as answer:
        lines = [line for line in answer.read().decode().split("\n") if line.startswith("data: {")]
    assert lines[0] == 'data: {"choices": [{"del'
    assert "the connection to http://127.0.0.1:" in json.loads(lines[1][6:])["error"]["message"]


def test_an_endpoint_that_is_not_there_or_is_none_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with viewer(tmp_path, endpoint=EndpointProxy(f"http://127.0.0.1:{port}/v1")) as url:
        assert f"http://127.0.0.1:{port}/v1 cannot be reached" in error_of(url)
        assert "cannot be reached" in json.loads(get(url, "/api/endpoint")[2])["error"]

    async def page(request):
        return web.Response(text="<html>", content_type="text/html")

    async def deep(request):
        return web.Response(body=b'{"a": ' + b"[" * 20000 + b"]" * 20000 + b"}", content_type="application/json")

    for models in (page, deep):
        with viewer_of(tmp_path, page, models=models) as url:
            assert "is no list of models" in json.loads(get(url, "/api/endpoint")[2])["error"]


async def endless(request):
    response = await begin(request)
    while True:
        await response.write(event({"content": "word "}))
        await asyncio.sleep(0.02)


def test_an_answer_has_a_deadline(tmp_path):
    with viewer_of(tmp_path, endless, stream_seconds=0.4) as url:
        assert "not done within 0.4 s" in error_of(url)


def test_an_answer_that_nobody_reads_has_a_deadline_too(tmp_path):
    async def flood(request):
        response = await begin(request)
        while True:
            await response.write(event({"content": "x" * 100_000}))

    with in_a_thread(stand_in(flood)) as endpoint:
        proxy = EndpointProxy(endpoint, stream_seconds=0.2)
        with viewer(tmp_path, endpoint=proxy) as url, asked(url) as answer:
            assert answer.read(60)
            assert proxy.streams == 1
            assert becomes(lambda: proxy.streams == 0)


def test_an_answer_has_so_many_bytes_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint_proxy, "MAX_STREAM_BYTES", 1000)
    with viewer_of(tmp_path, endless) as url:
        assert "sent more than 1000 bytes" in error_of(url)


def test_who_leaves_stops_the_endpoint(tmp_path):
    with viewer_of_model(tmp_path, rule=lambda prompt: "word " * 600, pause=0.02) as (url, live):
        with asked(url) as answer:
            answer.read(200)
            assert live.engine.running == 1
        assert becomes(lambda: live.engine.cancelled == 1 and live.engine.running == 0)


def test_so_many_answers_at_a_time_and_no_more(tmp_path):
    with viewer_of(tmp_path, endless) as url:
        open_ones = [asked(url) for _ in range(MAX_STREAMS)]
        for one in open_ones:
            one.__enter__().read(60)
        with asked(url) as answer:
            assert answer.status == 503
            assert answer.getheader("retry-after") == "1"
            assert "stop one" in json.loads(answer.read())["error"]["message"]
        for one in open_ones:
            one.__exit__(None, None, None)

        def taken():
            with asked(url) as answer:
                return answer.status == 200

        assert becomes(taken)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1/v1",
        "http://",
        "http://a:b@127.0.0.1/v1",
        "http://[",
        "http://127.0.0.1/v1?x=1",
        "http://a..b/v1",
    ],
)
def test_an_address_that_is_none_is_named(address):
    with pytest.raises(ConfigError, match="is no address of an endpoint"):
        EndpointProxy(address)


def test_a_key_with_a_line_end_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match=KEY_VARIABLE) as raised:
        EndpointProxy("http://127.0.0.1:8000/v1", f"{KEY}\n")
    assert KEY not in str(raised.value)


def test_the_command_takes_an_endpoint_without_runs_and_ends_by_ctrl_c_while_it_streams(tmp_path):
    command = [sys.executable, "-m", "verl_tool.viewer", "--port", "0", "--endpoint"]
    environment = {**os.environ, "COLUMNS": "200", KEY_VARIABLE: KEY}
    with in_a_thread(stand_in(endless)) as endpoint:
        process = subprocess.Popen(
            [*command, endpoint], stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[1]
            with asked(url) as answer:
                assert answer.read(60)
                process.send_signal(signal.SIGINT)
                assert process.wait(20) is not None
        finally:
            process.kill()
            process.wait()


def test_a_copy_takes_no_endpoint(tmp_path):
    command = [sys.executable, "-m", "verl_tool.viewer", str(tmp_path), "--export", "copy", "--endpoint", "http://a/v1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, cwd=tmp_path)
    assert done.returncode == 2
    assert "--endpoint and --branch do nothing" in done.stderr
    assert not (tmp_path / "copy").exists()
