"""Whatever is sent to the endpoint, it answers, says what was wrong, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hostile import MAX_CALLBACK_SECONDS, ask, check_answer, longest_callback, odd_bodies, odd_headers
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import RuleEngine, plain_tokenizer

from eval_service.openai.endpoint import Endpoint
from eval_service.service import Service
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.http.host_check import HostCheck
from verl_tool.http.request_body import RequestBodies

COMMON = {
    "model": "toy", "n": 1, "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {"1": 1}, "max_tokens": 4, "stop": ["x"], "seed": 1,
    "stream": False, "stream_options": None, "user": "u", "tools": [], "tool_choice": "none", "extra_fields": {},
    "return_trajectory": True, "response_format": {"type": "text"}, "store": False,
}  # fmt: skip
CHAT = {**COMMON, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
COMPLETION = {**COMMON, "prompt": "hi", "logprobs": 2, "echo": False, "best_of": 1, "suffix": None}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/\u2028", "/health", "/metrics", "/x\ny")


class Running:
    """One endpoint in an event loop of the module's own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        tokenizer = plain_tokenizer()
        self.engine = RuleEngine(tokenizer, lambda text: "Hello.", max_model_len=512)
        service = Service(self.engine, tokenizer, None, EpisodeOptions.load({"enable_agent": False}), max_queued=2048)
        self.endpoint = Endpoint(service, "toy", bodies=RequestBodies(grace_seconds=1.0))

    def ask(self, *request: Any, **options: Any) -> tuple[int, dict[bytes, bytes], bytes]:
        return self.loop.run_until_complete(ask(self.endpoint, *request, **options))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    it = Running()
    yield it
    it.loop.close()


@settings(max_examples=150)
@given(chat=odd_bodies([CHAT]), completion=odd_bodies([COMPLETION]), headers=odd_headers(), parts=st.integers(1, 3))
def test_any_body_is_answered(
    running: Running, chat: bytes, completion: bytes, headers: list[tuple[bytes, bytes]], parts: int
) -> None:
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        check_answer(*running.ask("POST", path, body, headers, parts=parts))
    assert running.ask("GET", "/health")[0] == 200
    assert running.endpoint.bodies.held == 0
    assert running.endpoint.service.admission.inside == 0


@settings(max_examples=40)
@given(method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "x\ny"]), path=st.sampled_from(PATHS))
def test_any_method_and_path_is_answered(running: Running, method: str, path: str) -> None:
    check_answer(*running.ask(method, path, b"{}"))


@pytest.mark.parametrize(
    ("further", "param"),
    [
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9 * 3]}, "prompt"),
        ({"prompt": ["x"] * 2000}, "n"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"n": 10**9}, "n"),
        ({"n": -1}, "n"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
        ({"logprobs": 1000}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"top_k": 2**40}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"extra_fields": {"x": "y" * 300_000}}, "extra_fields"),
        ({"user": "u" * 1000}, "user"),
    ],
)
def test_values_beyond_a_limit_are_refused_by_name(running: Running, further: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "toy", "prompt": "hi", **further}).encode()
    status, _, answer = running.ask("POST", "/v1/completions", body)
    assert status == 400, answer
    assert json.loads(answer)["error"]["param"].partition(".")[0] == param


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([5, -1], "token id -1; this model's vocabulary is from 0 to 258"),
        ([5, 259], "token id 259; this model's vocabulary is from 0 to 258"),
        ([[5], [6, 10**12]], "token id 1000000000000; this model's vocabulary is from 0 to 258"),
        ([10**4000], "token id a number of very many digits; this model's vocabulary is from 0 to 258"),
        ([5, 6.0], "entry 1 of its token ids is 6.0"),
        ([5, 6, True], "entry 2 of its token ids is True"),
        ([[5], [6, "7"]], "entry 1 of its token ids is '7'"),
        ([None], "entry 0 of its token ids is None"),
    ],
)
def test_what_is_no_token_of_the_model_never_reaches_the_engine(running: Running, prompt: Any, words: str) -> None:
    asked = len(running.engine.params)
    status, _, answer = running.ask("POST", "/v1/completions", json.dumps({"model": "toy", "prompt": prompt}).encode())
    told = json.loads(answer)["error"]
    assert (status, told["param"]) == (400, "prompt"), told
    assert words in told["message"]
    assert len(running.engine.params) == asked
    assert running.ask("POST", "/v1/completions", b'{"model": "toy", "prompt": [0, 258], "max_tokens": 1}')[0] == 200


_PARTS = [{"type": "text", "text": "x"}] * 9000
LARGE = {
    "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200}] * 4096}),
    "many parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 9000}]},
    ),
    "many tools": ("/v1/chat/completions", {"messages": [], "tools": [{"function": {"name": "x" * 200}}] * 128}),
    "many token ids": ("/v1/completions", {"prompt": [1] * 90_000}),
    "many prompts": ("/v1/completions", {"prompt": [[1] * 80] * 1000}),
    "many answers": ("/v1/completions", {"prompt": "hi", "n": 200, "logprobs": 5, "return_trajectory": True}),
}


@pytest.mark.parametrize("name", LARGE)
def test_one_callback_is_short(running: Running, name: str) -> None:
    path, body = LARGE[name]
    with longest_callback() as longest:
        status = running.ask("POST", path, json.dumps({"model": "toy", "max_tokens": 4, **body}).encode())[0]
    assert status in (200, 400, 503)
    assert longest[0] < MAX_CALLBACK_SECONDS


def test_a_page_of_another_name_is_refused(running: Running) -> None:
    endpoint = Endpoint(running.endpoint.service, "toy", host_check=HostCheck("127.0.0.1", 8000))
    for host, status in ((b"localhost:8000", 200), (b"evil.example:8000", 403)):
        answer = running.loop.run_until_complete(ask(endpoint, "GET", "/v1/models", headers=[(b"host", host)]))
        assert answer[0] == status
