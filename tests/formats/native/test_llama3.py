from __future__ import annotations

import pytest

from verl_tool.formats import LLAMA3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"a": "1"}}', [("f", "1")]),
        ('\n{"name": "f", "arguments": {"a": "1"}}<|eom_id|>', [("f", "1")]),
        ('{"name": "f", "parameters": {"a": "1"}}; {"name": "g", "parameters": {"b": "2"}}', [("f", "1"), ("g", "2")]),
        ('so</think>{"name": "f", "parameters": {"a": "1"}}', [("f", "1")]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": "1"}}', [("f", "1")]),
        ('I see.<|python_tag|>{"name": "f", "parameters": {"a": "1"}}<|eom_id|>', [("f", "1")]),
        ('<|python_tag|>brave_search.call(query="a \\"b\\"")', [("brave_search", 'a \\"b\\"')]),
        ("<|python_tag|>print(1 + 1)<|eom_id|>", [("python", "print(1 + 1)")]),
        ("<|python_tag|>a.call(1)", [("python", "a.call(1)")]),
        ('I would call {"name": "f", "parameters": {}}', []),
        ('{"name": "f", "parameters": {}} would do', []),
        ('{"answer": 1}', []),
        ("", []),
    ],
)
def test_finds(text: str, expected: list[tuple[str, str]]) -> None:
    found = LLAMA3.find_calls(text)
    assert [(each.name, each.input) for each in found] == expected
    assert all(each.error is None for each in found)


@pytest.mark.parametrize("text", ['{"name": "f", "parameters": {"a": }}', '<|python_tag|>{"name": "f", "param'])
def test_broken_json_says_why(text: str) -> None:
    [found] = LLAMA3.find_calls(text)
    assert (found.name, found.start, found.end) == ("f", 0, len(text))
    assert found.error is not None
    assert "not valid JSON" in found.error
