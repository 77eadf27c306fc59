from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from verl_tool.agent_loop.trajectory import (
    Author,
    CallRecord,
    Excluded,
    Segment,
    StopReason,
    Timings,
    Trajectory,
    read_jsonl,
    write_jsonl,
)
from verl_tool.protocol import Fault, FaultKind

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.floats(allow_nan=False)
FAULT = st.builds(Fault, kind=st.sampled_from(FaultKind), message=TEXT, retryable=st.booleans())
JSON = st.dictionaries(TEXT, st.none() | st.integers() | TEXT | st.lists(st.booleans()), max_size=3)
TOKENS = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    author, tokens = draw(st.sampled_from(Author)), draw(TOKENS)
    log_probs = draw(st.none() | st.tuples(*[NUMBER] * len(tokens))) if author is Author.MODEL else None
    return Segment(author, tokens, log_probs, draw(TEXT))


CALLS = st.builds(
    CallRecord,
    step=st.integers(0, 9),
    action=TEXT,
    observation=TEXT,
    valid=st.booleans(),
    done=st.booleans(),
    reward=st.none() | NUMBER,
    invalid_reason=st.none() | TEXT,
    fault=st.none() | FAULT,
    metrics=st.dictionaries(TEXT, NUMBER, max_size=2),
    visible_tokens=st.integers(0, 99),
    truncated=st.booleans(),
    seconds=NUMBER,
)
TRAJECTORIES = st.builds(
    Trajectory,
    trajectory_id=TEXT,
    segments=st.lists(segments(), max_size=4).map(tuple),
    stop=st.sampled_from(StopReason),
    prompt_segments=st.integers(0, 2),
    calls=st.lists(CALLS, max_size=2).map(tuple),
    fault=st.none() | FAULT,
    excluded=st.none() | st.sampled_from(Excluded),
    loss_on_observations=st.booleans(),
    prompt_truncated=st.booleans(),
    reward=st.none() | NUMBER,
    timings=st.builds(
        Timings, generate=NUMBER, tools=NUMBER, total=NUMBER, turns=st.lists(NUMBER, max_size=2).map(tuple)
    ),
    generator=JSON,
    extra=JSON,
)


@given(TRAJECTORIES)
def test_a_line_of_json_gives_the_same_trajectory(trajectory: Trajectory) -> None:
    line = trajectory.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Trajectory.from_json(line) == trajectory


@given(TRAJECTORIES)
def test_columns_of_the_response_have_one_length(trajectory: Trajectory) -> None:
    n = len(trajectory.response_ids)
    assert len(trajectory.response_mask) == len(trajectory.loss_mask) == n
    assert trajectory.response_log_probs is None or len(trajectory.response_log_probs) == n
    assert len(trajectory.prompt_ids) + n == sum(len(s.tokens) for s in trajectory.segments)


def test_a_file_holds_one_line_a_trajectory(tmp_path: Path) -> None:
    minus_infinity = Segment(Author.MODEL, (3,), (-math.inf,), "c")
    some = [Trajectory(str(i), (Segment(Author.PROMPT, (1, 2)), minus_infinity), StopReason.ANSWERED) for i in range(3)]
    path = tmp_path / "step_1.jsonl"
    write_jsonl(path, some)
    assert list(read_jsonl(path)) == some
    assert len(path.read_text().splitlines()) == 3
    assert some[0].with_reward(1.0).reward == 1.0


def test_a_record_of_before_has_no_times_of_turns() -> None:
    line = Trajectory("a", (Segment(Author.PROMPT, (1,)),), StopReason.ANSWERED, timings=Timings(0.5, 0, 1)).to_json()
    older = json.loads(line)
    del older["timings"]["turns"]
    assert Trajectory.from_json(json.dumps(older)).timings == Timings(0.5, 0, 1, ())


def test_turns_are_numbered_and_each_knows_its_call() -> None:
    segments = [(Author.MODEL, (3, 4)), (Author.TOOL, (5,)), (Author.TEMPLATE, (6,)), (Author.MODEL, (7,))]
    prompt = (Segment(Author.PROMPT, (1, 2)),)
    response = tuple(Segment(author, tokens) for author, tokens in segments)
    asked = Trajectory("a", prompt + response, StopReason.ANSWERED, calls=(CallRecord(0, "search"),))
    assert asked.turn_ids == [1, 1, 0, 0, 2]
    assert asked.turn_calls == asked.calls
    shown_first = replace(
        asked,
        segments=(*prompt, Segment(Author.TOOL, (9,)), *response),
        prompt_segments=2,
        calls=(CallRecord(0, ""), CallRecord(1, "search")),
    )
    assert shown_first.turn_ids == [1, 1, 0, 0, 2]
    assert shown_first.turn_calls == shown_first.calls[1:]
    ended_at_once = replace(asked, segments=prompt, calls=(CallRecord(0, ""),))
    assert ended_at_once.turn_ids == []
    assert ended_at_once.turn_calls == ()


@given(TRAJECTORIES)
def test_turn_ids_tell_who_wrote_what(trajectory: Trajectory) -> None:
    assert [int(turn > 0) for turn in trajectory.turn_ids] == trajectory.response_mask
    assert max(trajectory.turn_ids, default=0) <= trajectory.num_turns
    assert len(trajectory.turn_calls) <= trajectory.num_turns


def test_a_line_that_is_no_trajectory_is_refused() -> None:
    with pytest.raises(ValidationError, match="segments"):
        Trajectory.from_json('{"trajectory_id": "a", "stop": "answered"}')
