"""Terms of a reward and their ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, StopReason, Trajectory
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.grading.shaping import Shaping
from verl_tool.protocol import Fault, FaultKind


def sample(
    *turns: str, calls: tuple[CallRecord, ...] = (), stop: StopReason = StopReason.ANSWERED, length: int = 10
) -> Sample:
    segments = (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2,) * length))
    return Sample("s", "g", turns, Trajectory("t", segments, stop, calls=calls))


def call(step: int = 0, **fields: object) -> CallRecord:
    return CallRecord(step=step, action="x", **fields)  # type: ignore[arg-type]


def value(name: str, of: Sample, **options: object) -> float:
    return Shaping.model_validate({name: {"weight": 1.0, **options}}).values(of)[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text: str, expected: float) -> None:
    assert value("format", sample(text)) == expected


def test_tool_terms() -> None:
    none = sample("a")
    mixed = sample("a", calls=(call(metrics={"error": 1.0}), call(valid=False), call(), call()))
    assert [value(name, none) for name in ("tool_used", "tool_valid", "tool_error")] == [0.0, 1.0, 0.0]
    assert [value(name, mixed) for name in ("tool_used", "tool_valid", "tool_error")] == [1.0, 0.75, 0.25]
    assert value("tool_used", sample("a", calls=(call(valid=False),))) == 0.0
    for kind, share in ((FaultKind.TIMEOUT, 1.0), (FaultKind.UNREACHABLE, 0.0)):
        fault = Fault(kind=kind, message="because", retryable=False)
        assert value("tool_error", sample("a", calls=(call(fault=fault),))) == share
    assert value("turns", mixed, limit=8) == 0.5
    assert value("turns", mixed, limit=2) == 1.0


def test_an_error_is_known_from_the_observation_if_no_metric_tells() -> None:
    traced = call(observation="Traceback (most recent call last):\n  ...")
    assert value("tool_error", sample("a", calls=(traced,))) == 1.0
    told = call(observation="Traceback (most recent call last)", metrics={"error": 0.0})
    assert value("tool_error", sample("a", calls=(told,))) == 0.0


def test_unfinished() -> None:
    assert value("unfinished", sample("a", stop=StopReason.MAX_TURNS)) == 1.0
    assert value("unfinished", sample("a", stop=StopReason.TOOL_DONE)) == 0.0
    assert value("unfinished", sample("a", stop=StopReason.INVALID_CALLS)) == 1.0
    assert value("unfinished", sample("a", stop=StopReason.FAULT)) == 1.0


@pytest.mark.parametrize(("length", "expected"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_overlong(length: int, expected: float) -> None:
    assert value("overlong", sample("a", length=length), limit=100, buffer=20) == pytest.approx(expected)


def test_tool_rewards() -> None:
    rewarded = sample("a", calls=(call(reward=0.5), call(), call(reward=0.9)))
    assert value("tool_reward", rewarded) == 1.0
    assert value("tool_reward", rewarded, bound=2.0) == pytest.approx(1.4)
    assert value("tool_reward", rewarded, reduce="mean") == pytest.approx(0.7)
    assert value("tool_reward", sample("a")) == 0.0


def test_a_call_costs_what_its_tool_costs() -> None:
    used = sample(
        "a", calls=(call(names=("sql",)), call(names=("search", "python")), call(), call(names=("x",), done=True))
    )
    assert value("tool_cost", used) == 4.0
    assert value("tool_cost", used, costs={"sql": 3, "search": 0}, default=0.5) == 4.0
    assert value("tool_cost", used, limit=2) == 2.0
    assert value("tool_cost", sample("a")) == 0.0
    with pytest.raises(ValidationError, match="the cost of sql is below 0"):
        Shaping.model_validate({"tool_cost": {"weight": 1, "costs": {"sql": -1}}})


def test_the_first_valid_use_of_each_tool_counts_once() -> None:
    used = sample(
        "a",
        calls=(
            call(names=("sql",), metrics={"error": 1.0}),
            call(names=("search",), valid=False),
            call(names=("python",)),
            call(names=("python",)),
            call(names=("finish",), done=True),
        ),
    )
    assert value("first_use", used) == 1.0
    assert value("first_use", used, tools=["python", "sql"]) == 0.5
    assert value("first_use", used, tools=["finish", "search", "sql"]) == 0.0
    assert value("first_use", sample("a", calls=(call(valid=False),))) == 0.0


def said(action: str, observation: str) -> CallRecord:
    return CallRecord(step=0, action=action, observation=observation)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], 0.0),
        ([said("<search>a</search>", "x")], 0.0),
        ([said("<search>a</search>", "x"), said("So: <search> a\n</search>", "x")], 0.5),
        ([said("<search>a</search>", "x"), said("<search>b</search>", "x")], 0.0),
        ([said("<python>a()</python>", "1"), said("<python>a()</python>", "2")], 0.0),
        (
            [
                said('<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2}}</tool_call>', "x"),
                said('Again <tool_call>{"name": "f", "arguments": {"b": 2, "a": 1}}</tool_call>', "x"),
                said('<tool_call>{"name": "g", "arguments": {"a": 1, "b": 2}}</tool_call>', "x"),
            ],
            1 / 3,
        ),
        (
            [
                said("<sql>SELECT 1</sql>", "1\n<reminder>You have 3 turns left to complete the task.</reminder>"),
                said("<sql>SELECT  1</sql>", "1\n<reminder>You have 2 turns left to complete the task.</reminder>"),
            ],
            0.5,
        ),
        ([said("no call", "what?"), said("no call", "what?"), said("no call", "what?")], 2 / 3),
    ],
)
def test_only_a_repeat_that_tells_nothing_new_counts(calls: list[CallRecord], expected: float) -> None:
    assert value("repeat", sample("a", calls=tuple(calls))) == pytest.approx(expected)


def test_weights_and_order() -> None:
    shaping = Shaping.model_validate({"tool_used": {"weight": -0.25}, "unfinished": {"weight": 2.0}})
    assert shaping.values(sample("a", calls=(call(),))) == {"tool_used": -0.25, "unfinished": 0.0}
    assert Shaping().values(sample("a")) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"tool_usedd": {"weight": 1}},
        {"tool_used": {}},
        {"tool_used": {"weight": 1, "limit": 3}},
        {"overlong": {"weight": 1, "limit": 10, "buffer": 11}},
        {"turns": {"weight": 1, "limit": 0}},
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Shaping.model_validate(options)


RANGES = {
    "format": (0, 1, {}),
    "tool_used": (0, 1, {}),
    "tool_valid": (0, 1, {}),
    "tool_error": (0, 1, {}),
    "turns": (0, 1, {"limit": 2}),
    "unfinished": (0, 1, {}),
    "overlong": (-1, 0, {"limit": 30, "buffer": 7}),
    "tool_reward": (-3, 3, {"bound": 3}),
    "tool_cost": (0, 4, {"limit": 4, "costs": {"sql": 3}}),
    "first_use": (0, 1, {"tools": ["sql", "python"]}),
    "repeat": (0, 1, {}),
}
CALLS = st.builds(
    call,
    valid=st.booleans(),
    reward=st.none() | st.floats(-100, 100),
    metrics=st.sampled_from([{}, {"error": 0.0}, {"error": 1.0}]),
)


@given(st.lists(CALLS, max_size=5), st.sampled_from(StopReason), st.integers(0, 60), st.text(max_size=30))
def test_values_stay_in_the_documented_ranges(
    calls: list[CallRecord], stop: StopReason, length: int, text: str
) -> None:
    of = sample(text, calls=tuple(calls), stop=stop, length=length)
    assert set(RANGES) == set(Shaping.model_fields)
    for name, (least, most, options) in RANGES.items():
        assert least <= value(name, of, **options) <= most
