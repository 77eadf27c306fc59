"""Where a trajectory is left, and what stands there in place of what was: the beginning of its branches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eval_service.evaluation.dataset import Problem
from verl_tool.agent_loop.trajectory import CallRecord, Segment, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.gateway.session_record import SESSION
from verl_tool.protocol import StepResult
from verl_tool.replay.stored import Stored

_PLACE = re.compile(r"(?:trajectories/)?((?:branches/)?[^/\s:]+):([1-9]\d{0,8})")


@dataclass(frozen=True)
class BranchPlace:
    """A line of a run's file."""

    file: str
    """``step_3.jsonl``, or ``branches/step_3.17.jsonl``."""
    line: int
    """From 1."""

    @classmethod
    def read(cls, text: str) -> BranchPlace:
        """That of ``FILE:LINE``. Raises ConfigError."""
        found = _PLACE.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text[:200]!r} is no FILE:LINE of the run; write it as step_3.jsonl:17")
        # The viewer shows names without their ending.
        name = found[1] if found[1].endswith(".jsonl") else f"{found[1]}.jsonl"
        return cls(name, int(found[2]))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Edit:
    """What stands in place of a turn's action, or of the observation that answered it."""

    part: Literal["action", "observation"]
    text: str


@dataclass(frozen=True)
class BranchPoint:
    """The beginning of branches: all before a turn of the model, and what is edited there. `branch_point` makes it."""

    place: BranchPlace
    trajectory: Trajectory
    row: Problem
    turn: int
    """From 1."""
    edit: Edit | None = None

    @property
    def partial(self) -> Trajectory:
        """The trajectory up to the turn, its tokens as they are recorded."""
        return replace(
            self.trajectory,
            segments=self.trajectory.segments[: _turns(self.trajectory)[self.turn - 1]],
            calls=self.trajectory.calls[: _calls_before(self.trajectory, self.turn)],
        )

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """Those that the tools' state is left by: before the turn, and the turn's own if its observation is edited."""
        edits_observation = self.edit is not None and self.edit.part == "observation"
        return self.trajectory.calls[: _calls_before(self.trajectory, self.turn + edits_observation)]

    @property
    def recorded_turn(self) -> Segment:
        """What the model wrote in the turn."""
        return self.trajectory.segments[_turns(self.trajectory)[self.turn - 1]]

    @property
    def edited_answer(self) -> StepResult | None:
        """The answer to the turn's call, if it is edited: as it was, but for the observation."""
        if self.edit is None or self.edit.part != "observation":
            return None
        call = self.calls[-1]
        return StepResult(
            self.trajectory.trajectory_id,
            self.edit.text,
            valid=call.valid,
            reward=call.reward,
            invalid_reason=call.invalid_reason,
            metrics=call.metrics,
        )


def branch_point(place: BranchPlace, stored: Stored, turn: int, edit: Edit | None = None) -> BranchPoint:
    """The point before turn `turn`, from 1, of the trajectory at `place`. Raises ConfigError if a branch cannot begin
    there: there is no such turn, the trajectory has images or no row, or there is nothing that `edit` could replace."""
    trajectory = stored.trajectory
    if trajectory is None:
        raise ConfigError(
            f"{place} is the answer of an endpoint that gave no trajectory; there are no turns to go on from"
        )
    if stored.row is None:
        raise ConfigError(
            f"{place} has no row in the data, without which it cannot be graded; give its file: --data FILE"
        )
    if stored.row.images or any(segment.image is not None for segment in trajectory.segments):
        raise ConfigError(f"{place} has images, and branches go on from trajectories of text only")
    if SESSION in trajectory.extra:
        raise ConfigError(
            f"{place} is the session of an agent that ran its tools itself, and only that agent could go on; start it "
            "anew, or give a line of the loop's own"
        )
    if any(call.agent or call.local for call in trajectory.calls):
        raise ConfigError(
            f"{place} has sub-agents, whose calls no turn of the main agent stands for; give another line"
        )
    if any(call.over_mcp for call in trajectory.calls):
        raise ConfigError(
            f"{place} is of an agent that called tools over MCP, which is not run again; give another line"
        )
    if trajectory.contexts:
        raise ConfigError(
            f"the model was fed {1 + len(trajectory.contexts)} contexts in {place}, and a branch goes on in one; "
            "give a line whose context was never cut"
        )
    turns = trajectory.num_turns
    if not 1 <= turn <= turns:
        raise ConfigError(
            f"{place} has {turns} turns of the model, and turn {turn} is none of them; give --turn 1 to {turns}"
        )
    _check_calls(place, trajectory, turn)
    if edit is not None:
        _check_edit(place, trajectory, turn, edit)
    return BranchPoint(place, trajectory, stored.row, turn, edit)


def _check_calls(place: BranchPlace, trajectory: Trajectory, turn: int) -> None:
    """Raises ConfigError if the calls before a turn are not those of the turns before it."""
    calls, turns = trajectory.turn_calls, _turns(trajectory)
    for number in range(turn - 1):
        text = trajectory.segments[turns[number]].text
        call = calls[number] if number < len(calls) else None
        if call is None or call.fault is not None or call.done or (text and not text.startswith(call.action)):
            raise ConfigError(f"{place}: turn {number + 1} has no call that was answered, so nothing goes on behind it")


def _check_edit(place: BranchPlace, trajectory: Trajectory, turn: int, edit: Edit) -> None:
    if edit.part == "action":
        if not edit.text:
            raise ConfigError("--action is empty; write what the model shall have written")
        return
    calls = trajectory.turn_calls
    call = calls[turn - 1] if turn <= len(calls) else None
    why = None
    if call is None:
        why = "called no tool"
    elif call.fault is not None:
        why = f"made a call that ended in a fault ({call.fault.kind.value})"
    elif call.done:
        why = "made a call that ended the trajectory"
    if why is not None:
        raise ConfigError(
            f"{place}: turn {turn} {why}, so it has no observation to edit; give --action, or another turn"
        )


def _turns(trajectory: Trajectory) -> Sequence[int]:
    """Where each turn of the model is among the segments."""
    first = trajectory.prompt_segments
    return [i for i, s in enumerate(trajectory.segments) if i >= first and s.is_turn]


def _calls_before(trajectory: Trajectory, turn: int) -> int:
    """How many calls were made before a turn, that of `call_tool_first` among them."""
    own = trajectory.calls[:1] != trajectory.turn_calls[:1]
    return min(len(trajectory.calls), int(own) + turn - 1)
