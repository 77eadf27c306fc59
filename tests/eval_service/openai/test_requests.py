"""What clients may send, and what they are told if it is wrong. (How errors look over HTTP: test_endpoint.py)"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.openai.requests import ChatRequest, CompletionRequest, read_request
from verl_tool.http.messages import HttpError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return read_request(json.dumps(CHAT | fields).encode(), ChatRequest)


def completion(prompt: Any) -> CompletionRequest:
    return read_request(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest)


def test_null_is_the_default_everywhere() -> None:
    names = [name for name, field in ChatRequest.model_fields.items() if not field.is_required()]
    given_null = chat(**{name: None for name in names if name != "return_trajectory"})
    assert given_null == chat()


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None, "name": "x"}])
    assert [m.for_template() for m in request.messages] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "name": "x"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert list(completion(prompt).prompts) == prompts


def test_names_of_tools() -> None:
    tool = {"type": "function", "function": {"name": "t", "description": "d", "parameters": {}, "strict": True}}
    assert chat().tool_names is None
    assert chat(tools=[tool]).tool_names == ("t",)
    assert chat(tools=[]).tool_names == ()
    assert chat(tools=[tool], tool_choice="none").tool_names == ()


def test_log_probs_of_both_forms() -> None:
    assert chat().top_log_probs is None
    assert chat(logprobs=True).top_log_probs == 0
    assert chat(logprobs=True, top_logprobs=3).top_log_probs == 3
    assert completion("a").top_log_probs is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "one setting under two names"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"stop": [""]}, "empty string"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\.0\.role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_off": 1}, "Unrecognized request argument supplied: best_off. Known: "),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(HttpError, match=words) as error:
        chat(**fields)
    assert error.value.status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), json_values, max_size=4))
def test_no_body_raises_anything_but_an_api_error(fields: dict[str, Any]) -> None:
    with contextlib.suppress(HttpError):
        assert isinstance(chat(**fields), ChatRequest)


@given(st.binary(max_size=30))
def test_nor_does_rubbish(body: bytes) -> None:
    with pytest.raises(HttpError):
        read_request(body, CompletionRequest)
