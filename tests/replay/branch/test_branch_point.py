"""Where branches begin: any turn of any trajectory, and what cannot be one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from stored_runs import trajectory
from toy_model import Template, ToyTokenizer, ToyTools

from eval_service.evaluation.dataset import Problem
from tests.agent_loop.test_properties import ANY_TEMPLATE, REPLIES, WORDS, any_options, run_random
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.trajectory import Author, CallRecord, RowContext, Segment, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.protocol import Fault, FaultKind, StepResult
from verl_tool.replay.branch.branch_point import Edit, RecordLocation, make_branch_point
from verl_tool.replay.stored import Grading, StoredAnswer

ROW = Problem(0, ({"role": "user", "content": "Buy."},), "shop", {})
LOCATION = RecordLocation("step_1.jsonl", 4)
TURNS = [("<a>1</a>", "one"), ("<a>2</a>", "two"), ("three", "")]


def stored(made: Trajectory | None, row: Problem | None = ROW) -> StoredAnswer:
    return StoredAnswer("step_1.jsonl:4", row, Grading(), made)


class Recorded:
    """A model that writes what it wrote; `fed`: what it was given."""

    def __init__(self, turns: list[Segment]) -> None:
        self.turns = turns
        self.fed: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        self.fed.append(prompt_ids)
        turn = self.turns[len(self.fed) - 1]
        return Generation(turn.tokens, turn.log_probs)


def answered(call: CallRecord) -> StepResult:
    return StepResult("t", call.observation, call.done, call.valid, call.fault)


@settings(max_examples=60, deadline=None)
@given(ANY_TEMPLATE, any_options(), st.lists(REPLIES, min_size=1, max_size=4), st.integers(0, 10**6), st.data())
def test_a_model_and_tools_that_do_as_before_make_the_same_trajectory_from_any_turn(
    template: Template, values: dict[str, Any], replies: list[str], seed: int, data: st.DataObject
) -> None:
    """Tokens, log-probabilities, masks, calls and the end are those of the record, whatever the options."""
    made, _, _, options = run_random(template, values, replies, seed)
    assume(made.num_turns > 0)
    # An empty answer to the loop's own first call leaves no trace: the call may then be taken for the model's.
    assume(len(made.calls) - len(made.turn_calls) == options.call_tool_first)
    turn = data.draw(st.integers(1, made.num_turns))
    point = make_branch_point(LOCATION, stored(made), turn)
    partial = point.partial
    assert partial.segments == made.segments[: len(partial.segments)]
    assert (partial.num_turns, len(point.calls)) == (turn - 1, turn - 1 + options.call_tool_first)

    model = Recorded([s for s in made.response if s.author is Author.MODEL][turn - 1 :])
    tools = ToyTools(lambda action, number: answered(made.calls[len(point.calls) + number]))
    episode = Episode(model, tools, ToyTokenizer(template, WORDS), options)
    again = asyncio.run(episode.run(partial.prompt_ids, partial=partial))

    assert model.fed[0] == [token for segment in partial.segments for token in segment.tokens]
    assert (again.segments, again.prompt_segments, again.stop) == (made.segments, made.prompt_segments, made.stop)
    assert (again.excluded, again.loss_mask) == (made.excluded, made.loss_mask)
    assert [replace(c, seconds=0.0) for c in again.calls] == [replace(c, seconds=0.0) for c in made.calls]
    assert [asked.step for asked in tools.asked] == [call.step for call in made.calls[len(point.calls) :]]


def test_an_edited_observation_keeps_its_call_in_the_state_and_not_in_the_beginning() -> None:
    point = make_branch_point(LOCATION, stored(trajectory(0, "Buy.", TURNS, None)), 2, Edit("observation", "2!"))
    assert [call.observation for call in point.calls] == ["one", "two"]
    assert [call.observation for call in point.partial.calls] == ["one"]
    assert point.recorded_turn.text == "<a>2</a>"
    assert point.edited_answer is not None
    assert point.edited_answer.observation == "2!"


def with_image(made: Trajectory) -> Trajectory:
    return replace(made, segments=(*made.segments[:2], replace(made.segments[2], image="ab" * 32), *made.segments[3:]))


def with_second_call(**changes: Any) -> Trajectory:
    made = trajectory(0, "Buy.", TURNS, None)
    return replace(made, calls=(made.calls[0], replace(made.calls[1], **changes)))


FAULT = Fault(kind=FaultKind.TIMEOUT, message="slow", retryable=False)
PLAIN = trajectory(0, "Buy.", TURNS, None)


@pytest.mark.parametrize(
    ("kept", "turn", "edit", "words"),
    [
        (stored(None), 1, None, "without a trajectory"),
        (stored(PLAIN, None), 1, None, "no row"),
        (stored(with_image(PLAIN)), 1, None, "has images"),
        (
            stored(replace(PLAIN, calls=(replace(PLAIN.calls[0], agent=1), *PLAIN.calls))),
            1,
            None,
            "of sub-agents",
        ),
        (stored(replace(PLAIN, extra={"session": {}})), 1, None, "only that agent could continue"),
        (stored(replace(PLAIN, contexts=(RowContext((1,), "window"),))), 1, None, "has 2 contexts"),
        (stored(PLAIN), 0, None, "give --turn 1 to 3"),
        (stored(PLAIN), 4, None, "give --turn 1 to 3"),
        (stored(PLAIN), 1, Edit("action", ""), "--action is empty"),
        (stored(PLAIN), 3, Edit("observation", "x"), "called no tool"),
        (stored(with_second_call(fault=FAULT)), 2, Edit("observation", "x"), r"made a call that failed \(timeout\)"),
        (stored(with_second_call(done=True)), 2, Edit("observation", "x"), "ended the trajectory"),
        (stored(with_second_call(done=True)), 3, None, "turn 2 has no answered call"),
        (stored(with_second_call(action="<a>7</a>")), 3, None, "turn 2 has no answered call"),
    ],
)
def test_what_cannot_be_a_beginning_is_refused(kept: StoredAnswer, turn: int, edit: Edit | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_branch_point(LOCATION, kept, turn, edit)


@pytest.mark.parametrize("text", ["step_1.jsonl", "step_1.jsonl:0", "../../x.jsonl:1", "/x.jsonl:1", "a/b.jsonl:1", ""])
def test_a_place_is_a_file_of_the_run_and_a_line(text: str) -> None:
    assert RecordLocation.parse("trajectories/step_1.jsonl:17") == RecordLocation("step_1.jsonl", 17)
    assert RecordLocation.parse("step_1:17") == RecordLocation("step_1.jsonl", 17)  # as the viewer shows it
    assert str(RecordLocation.parse("branches/step_1.17.jsonl:2")) == "branches/step_1.17.jsonl:2"
    with pytest.raises(ConfigError, match="is not FILE:LINE"):
        RecordLocation.parse(text)
