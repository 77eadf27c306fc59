"""A trajectory as turns: what the model wrote, which calls are in it, and what it was shown then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from verl_tool.agent_loop.actions import calls_of
from verl_tool.agent_loop.trajectory import Author, CallRecord, ParsedCall, Segment, StopReason, Trajectory
from verl_tool.errors import ConfigError

Json = dict[str, Any]
"""An object of JSON."""
_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], document: Any, but: str) -> _Model:
    """What another project's document tells. Raises ConfigError that begins with `but` and names the place."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{but}: {where}: {problem['msg']}") from None


@dataclass(frozen=True)
class Converted:
    """A trajectory in another form, or back from it."""

    result: Any
    not_carried: tuple[str, ...] = ()
    """What this one had, and the result does not."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model and what followed."""

    index: int
    """Of its segment in the trajectory."""
    model: Segment
    shown: tuple[Segment, ...]
    """The segments up to the model's next turn."""
    record: CallRecord | None
    calls: tuple[ParsedCall, ...]
    """Each with a name; `start` and `end` are places in the turn's text."""

    @property
    def observation(self) -> str:
        """What the tools' text was, as the model was shown it."""
        return "".join(segment.text for segment in self.shown if is_observation(segment))

    @property
    def subagents(self) -> tuple[int, ...]:
        """Numbers of the sub-agents that it started, in order."""
        return tuple(dict.fromkeys(segment.agent for segment in self.shown if segment.agent))

    @property
    def text_without_calls(self) -> str:
        """What the model wrote besides."""
        text, words, behind = self.model.text, "", 0
        for call in self.calls:
            words, behind = words + text[behind : call.start], call.end
        return words + text[behind:]


def is_observation(segment: Segment) -> bool:
    """Whether it is what a tool showed the main agent."""
    return segment.author is Author.TOOL and not segment.agent


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """The turns, in order."""
    places = [i for i, s in enumerate(trajectory.segments) if s.is_turn]
    places = [i for i in places if i >= trajectory.prompt_segments]
    ends = [*places, len(trajectory.segments)][1:]
    records = _records(trajectory, [trajectory.segments[i].text for i in places])
    return [
        Turn(
            i, trajectory.segments[i], trajectory.segments[i + 1 : end], record, _calls(trajectory.segments[i], record)
        )
        for i, end, record in zip(places, ends, records, strict=True)
    ]


def prompt_text(trajectory: Trajectory) -> str:
    """The prompt as the model saw it."""
    return "".join(segment.text for segment in trajectory.segments[: trajectory.prompt_segments])


def finish_reason(trajectory: Trajectory, turn: Turn, last: bool) -> str:
    """OpenAI's word for how a turn ended."""
    if last and trajectory.stop.overlong and trajectory.stop is not StopReason.MAX_TURNS:
        return "length"
    return "tool_calls" if turn.record is not None else "stop"


def _records(trajectory: Trajectory, texts: Sequence[str]) -> list[CallRecord | None]:
    """The call that ended each turn. In a trajectory of ours each turn but the last has one; elsewhere a turn may have
    none, and the next call is that of the next turn with its words."""
    left = list(trajectory.turn_calls)
    found = [left.pop(0) if left and left[0].action in text else None for text in texts]
    return found if not left else [*trajectory.turn_calls, *[None] * len(texts)][: len(texts)]


def _calls(model: Segment, record: CallRecord | None) -> tuple[ParsedCall, ...]:
    if record is None:
        return ()
    whole = record if record.calls is not None and model.text.startswith(record.action) else CallRecord(0, model.text)
    return tuple(call if call.name else replace(call, name="unknown") for call in calls_of(whole))


def foreign(
    trajectory_id: str, parts: Sequence[Segment], prompt: int, calls: Sequence[CallRecord], **told: Any
) -> Trajectory:
    """A trajectory from another project: how it ended is not known, and counts as answered."""
    segments = tuple(parts) or (Segment(Author.PROMPT, ()),)
    return Trajectory(trajectory_id, segments, StopReason.ANSWERED, prompt, tuple(calls), **told)
