from __future__ import annotations

import pytest

from verl_tool.formats import HARMONY

THOUGHT = "<|channel|>analysis<|message|>I need to=functions.x here.<|end|>"


@pytest.mark.parametrize(
    ("text", "name", "given"),
    [
        (' to=functions.f<|channel|>commentary json<|message|>{"a": "1"}<|call|>', "f", "1"),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "1"}', "f", "1"),
        (f'{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.f<|message|>{{"a": "1"}}<|call|>', "f", "1"),
        (f'{THOUGHT}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{"a": "1"}}', "f", "1"),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "python", "print(1)"),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", "f", "{}"),
    ],
)
def test_a_message_to_a_tool_is_a_call(text: str, name: str, given: str) -> None:
    [found] = HARMONY.find_calls(text)
    assert (found.name, found.input, found.error) == (name, given, None)


@pytest.mark.parametrize(
    "text",
    [
        THOUGHT,
        "<|channel|>final<|message|>Write to=functions.f<|return|>",
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>',
        "<|start|>user to=functions.f<|message|>{}<|end|>",
        "I write to=functions.f <|message|>{}",
        "to=functions.f",
    ],
)
def test_nothing_else_is(text: str) -> None:
    assert HARMONY.find_calls(text) == []


def test_broken_json_says_why() -> None:
    [found] = HARMONY.find_calls("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{'a': 1}<|call|>")
    assert found.name == "f"
    assert found.error is not None
    assert "not valid JSON" in found.error


def test_calls_of_one_turn_end_where_their_messages_do() -> None:
    one = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    two = "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
    assert [(one + two)[each.start : each.end] for each in HARMONY.find_calls(one + two)] == [one, two]


@pytest.mark.parametrize(
    ("text", "thoughts", "rest"),
    [
        (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Hi.<|return|>", "I need to=functions.x here.", "Hi."),
        ("<|channel|>commentary<|message|>I look.<|end|>", "", "I look."),
        ("<|channel|>analysis<|message|>Half a thou", "Half a thou", ""),
        (f"{THOUGHT}{THOUGHT}<|start|>assistant<|channel|>fin", "I need to=functions.x here.\n" * 2, ""),
        (f"{THOUGHT}<|start|>assistant", "I need to=functions.x here.", ""),
        ("Without a channel.", "", "Without a channel."),
    ],
)
def test_thoughts_and_text_are_read_from_their_channels(text: str, thoughts: str, rest: str) -> None:
    assert HARMONY.split_channels(text) == (thoughts.strip(), rest)
