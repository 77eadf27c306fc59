"""The point of a stored trajectory from which branches continue, and the edit there."""

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
from verl_tool.replay.stored import StoredAnswer

_LOCATION = re.compile(r"(?:trajectories/)?((?:branches/)?[^/\s:]+):([1-9]\d{0,8})")


@dataclass(frozen=True)
class RecordLocation:
    """A line of a file of a run."""

    file: str
    """``step_3.jsonl``, or ``branches/step_3.17.jsonl``."""
    line: int
    """From 1."""

    @classmethod
    def parse(cls, text: str) -> RecordLocation:
        """Parse ``FILE:LINE``. Raises ConfigError."""
        found = _LOCATION.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text[:200]!r} is not FILE:LINE; write it as step_3.jsonl:17")
        # The viewer displays names without their extension.
        name = found[1] if found[1].endswith(".jsonl") else f"{found[1]}.jsonl"
        return cls(name, int(found[2]))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Edit:
    """A replacement of a turn's action, or of the observation that answered it."""

    part: Literal["action", "observation"]
    text: str


@dataclass(frozen=True)
class BranchPoint:
    """The common beginning of branches: everything before a turn, and an edit. Made by `make_branch_point`."""

    location: RecordLocation
    trajectory: Trajectory
    row: Problem
    turn: int
    """From 1."""
    edit: Edit | None = None

    @property
    def partial(self) -> Trajectory:
        """The trajectory before the turn, with its recorded tokens."""
        return replace(
            self.trajectory,
            segments=self.trajectory.segments[: _turn_positions(self.trajectory)[self.turn - 1]],
            calls=self.trajectory.calls[: _count_calls_before(self.trajectory, self.turn)],
        )

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The calls behind the tools' state: those before the turn, and the turn's if its observation is edited."""
        edits_observation = self.edit is not None and self.edit.part == "observation"
        return self.trajectory.calls[: _count_calls_before(self.trajectory, self.turn + edits_observation)]

    @property
    def recorded_turn(self) -> Segment:
        """The recorded text of the turn."""
        return self.trajectory.segments[_turn_positions(self.trajectory)[self.turn - 1]]

    @property
    def edited_answer(self) -> StepResult | None:
        """The recorded answer to the turn's call with the edited observation. None if it is not edited."""
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


def make_branch_point(
    location: RecordLocation, stored: StoredAnswer, turn: int, edit: Edit | None = None
) -> BranchPoint:
    """Return the point before turn `turn`, from 1, of the trajectory at `location`. Raises ConfigError if there is no
    such turn, if the trajectory cannot be continued, or if it has nothing that `edit` replaces."""
    trajectory = stored.trajectory
    if trajectory is None:
        raise ConfigError(f"{location} is an answer without a trajectory, so it has no turns to continue from")
    if stored.row is None:
        raise ConfigError(f"{location} has no row in the data, so it cannot be graded; give its file: --data FILE")
    if stored.row.images or any(segment.image is not None for segment in trajectory.segments):
        raise ConfigError(f"{location} has images; only trajectories of text can be continued")
    if SESSION in trajectory.extra:
        raise ConfigError(
            f"{location} is the session of an agent program, which only that agent could continue; start it anew, or "
            "give a trajectory of the loop"
        )
    if any(call.opens for call in trajectory.calls):
        raise ConfigError(f"{location} took place in an environment, whose state cannot be made again; start it anew")
    if any(call.agent or call.local for call in trajectory.calls):
        raise ConfigError(f"{location} has calls of sub-agents, which have no turn; give another line")
    if any(call.over_mcp for call in trajectory.calls):
        raise ConfigError(f"{location} has calls over MCP, which cannot be run again; give another line")
    if trajectory.contexts:
        raise ConfigError(
            f"{location} has {1 + len(trajectory.contexts)} contexts, but a branch has one; give a line whose "
            "context was never cut"
        )
    turns = trajectory.num_turns
    if not 1 <= turn <= turns:
        raise ConfigError(f"{location} has {turns} turns of the model, but no turn {turn}; give --turn 1 to {turns}")
    _check_calls(location, trajectory, turn)
    if edit is not None:
        _check_edit(location, trajectory, turn, edit)
    return BranchPoint(location, trajectory, stored.row, turn, edit)


def _check_calls(location: RecordLocation, trajectory: Trajectory, turn: int) -> None:
    """Raise ConfigError unless each turn before `turn` has an answered call."""
    calls, positions = trajectory.turn_calls, _turn_positions(trajectory)
    for number in range(turn - 1):
        text = trajectory.segments[positions[number]].text
        call = calls[number] if number < len(calls) else None
        if call is None or call.fault is not None or call.done or (text and not text.startswith(call.action)):
            raise ConfigError(f"{location}: turn {number + 1} has no answered call, so no turn can follow it")


def _check_edit(location: RecordLocation, trajectory: Trajectory, turn: int, edit: Edit) -> None:
    if edit.part == "action":
        if not edit.text:
            raise ConfigError("--action is empty; give the text of the turn")
        return
    calls = trajectory.turn_calls
    call = calls[turn - 1] if turn <= len(calls) else None
    reason = None
    if call is None:
        reason = "called no tool"
    elif call.fault is not None:
        reason = f"made a call that failed ({call.fault.kind.value})"
    elif call.done:
        reason = "made a call that ended the trajectory"
    if reason is not None:
        raise ConfigError(
            f"{location}: turn {turn} {reason}, so it has no observation to edit; give --action or another turn"
        )


def _turn_positions(trajectory: Trajectory) -> Sequence[int]:
    """Return the index of each turn of the model in the segments."""
    first = trajectory.prompt_segments
    return [i for i, s in enumerate(trajectory.segments) if i >= first and s.is_turn]


def _count_calls_before(trajectory: Trajectory, turn: int) -> int:
    """Count the calls before a turn, including the one of `call_tool_first`."""
    tool_first = trajectory.calls[:1] != trajectory.turn_calls[:1]
    return min(len(trajectory.calls), int(tool_first) + turn - 1)
