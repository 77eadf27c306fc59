from __future__ import annotations

import json

import pytest

from verl_tool.formats import BARE_JSON


def test_a_turn_that_is_one_object_is_a_call() -> None:
    [call] = BARE_JSON.find_calls(' {"name": "finish", "parameters": {"answer": "42"}}\n')
    assert (call.name, call.input, call.start) == ("finish", "42", 1)


@pytest.mark.parametrize(
    "text", ["", "{}", "so {'name': 1}", 'I call {"name": "f"}', '{"name": "f"} done', '{"name": ', '{"name": 3}']
)
def test_anything_else_is_none(text: str) -> None:
    assert BARE_JSON.find_calls(text) == []


@pytest.mark.parametrize("output", ['{"name": "f"}', "a\nb", '"', "\\", "é"])
def test_the_answer_is_an_object_that_names_nothing(output: str) -> None:
    assert json.loads(BARE_JSON.render(output)) == {"result": output}
    assert BARE_JSON.find_calls(BARE_JSON.render(output)) == []
