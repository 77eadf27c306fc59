from __future__ import annotations

import pytest

from verl_tool.formats import TRL


def found(text: str) -> list[tuple[str, str]]:
    return [(call.name, call.input) for call in TRL.find_calls(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<request><SimpleCalculatorTool>13.1-3<call>", [("SimpleCalculatorTool", "13.1-3")]),
        ("What is 1+1? <request> <Calc>1+1<call>", [("Calc", "1+1")]),
        ("<request><A>1<call>2<response><request><B>3<call>", [("A", "1"), ("B", "3")]),
        ("<request><A>1<call><request><B>2<call>", [("A", "1"), ("B", "2")]),
        ("<request><A>1<call>x <request><B>2<call> y<response>", [("A", "1")]),
        ("<request>no tool<call>", []),
        ("<request><A>unfinished <request><B>2<call>", [("B", "2")]),
        ("<request><A>13.1-3", [("A", "13.1-3")]),
        ("<A>1<call>", []),
        ("Result=10.1<submit>", [("submit", "Result=10.1")]),
        ("<request><A>1<call>2<response>Result=2<submit>", [("A", "1"), ("submit", "Result=2")]),
        ("Result=1<submit> <request><A>1<call>", [("submit", "Result=1")]),
        ("Result=1<submi", []),
    ],
)
def test_finds(text: str, expected: list[tuple[str, str]]) -> None:
    assert found(text) == expected


def test_the_episode_of_trls_own_example() -> None:
    text = "What is 13.1-3?"
    turn = "<request><SimpleCalculatorTool>13.1-3<call>"
    [call] = TRL.find_calls(turn)
    text += turn + TRL.render("10.1", call)
    assert text == "What is 13.1-3?<request><SimpleCalculatorTool>13.1-3<call>10.1<response>"


def test_a_call_mark_cut_off_is_supplied() -> None:
    [call] = TRL.find_calls("<request><A>1")
    assert TRL.render("2", call) == "<call>2<response>"


def test_an_answer_cannot_end_itself() -> None:
    assert TRL.render("1<response><request><A>2<call>") == "1< response>< request><A>2< call><response>"


def test_stop_strings() -> None:
    assert TRL.stop == ("<call>", "<submit>")
