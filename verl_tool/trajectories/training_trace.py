"""OpenEnv's TrainingTrace, version 1: the model's turns with the tokens that it was fed, and a mask of the loss.

``openenv.core.harness.training`` of OpenEnv 0.10 (https://github.com/huggingface/OpenEnv).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.trajectories.skeleton import FIELD, Carried, restored, skeleton_of
from verl_tool.trajectories.turns import Converted, Json, Turn, finish_reason, foreign, turns_of, validated


class _Turn(BaseModel):
    model_config = ConfigDict(extra="ignore")

    node_id: str = Field(min_length=1)
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    response: Json = Field(default_factory=dict)
    metadata: Json = Field(default_factory=dict)


class _Trace(BaseModel):
    model_config = ConfigDict(extra="ignore")

    schema_version: Literal[1] = 1
    turns: list[_Turn]


def write(trajectory: Trajectory) -> Converted:
    """The trace; what it has no place for is in the ``metadata`` of its first turn.

    OpenEnv refuses turns without prompt, and without a log-probability of each token: they are left out. Raises
    ConfigError for a rollout of several training rows: the prompt of a turn must go on from the turn before.
    """
    if trajectory.contexts:
        raise ConfigError(
            f"rollout {trajectory.trajectory_id} has {len(trajectory.rows)} training rows, and a TrainingTrace is one "
            "sequence of tokens; write ATIF, which carries them"
        )
    every = turns_of(trajectory)
    turns = [turn for turn in every if _fits(trajectory, turn)]
    written = [_turn(trajectory, turn, number, last=turn is every[-1]) for number, turn in enumerate(turns)]
    lost = []
    if len(turns) < len(every):
        lost.append("turns without prompt or log-probabilities (none, above 0 or minus infinity)")
    if trajectory.loss_on_observations:
        lost.append("the loss on observations: a mask is 1 on the model's tokens only")
    if any(segment.image is not None for segment in trajectory.segments):
        lost.append("images (their SHA-256 only)")
    if turns:
        places = {turn.index for turn in turns}
        written[0]["metadata"][FIELD] = skeleton_of(trajectory, Carried(turns[-1].index, places, places))
    else:
        lost.append("all but the tokens of trajectories of which no turn is carried")
    return Converted({"schema_version": 1, "turns": written}, tuple(lost))


def read(document: Any) -> Converted:
    """The trajectory: the one that was written, or what another project's trace tells. Raises ConfigError."""
    trace = validated(_Trace, document, "this is no TrainingTrace of version 1")
    own = _own(trace)
    return Converted(own) if own is not None else _foreign(trace)


def _fits(trajectory: Trajectory, turn: Turn) -> bool:
    log_probs = turn.model.log_probs
    prompted = any(segment.tokens for segment in trajectory.segments[: turn.index])
    return prompted and log_probs is not None and all(math.isfinite(p) and p <= 0 for p in log_probs)


def _turn(trajectory: Trajectory, turn: Turn, number: int, *, last: bool) -> Json:
    before = [token for segment in trajectory.segments[: turn.index] for token in segment.tokens]
    message: Json = {"role": "assistant", "content": turn.model.text}
    valid = int(trajectory.excluded is None)
    return {
        "node_id": f"{trajectory.trajectory_id}/{number}",
        "prompt_token_ids": before,
        "completion_token_ids": list(turn.model.tokens),
        "per_token_logps": list(turn.model.log_probs or ()),
        "loss_mask": [0] * len(before) + [valid] * len(turn.model.tokens),
        "request": {},
        "response": {"choices": [{"message": message, "finish_reason": finish_reason(trajectory, turn, last)}]},
        "metadata": {"turn": number, "reward": trajectory.reward},
    }


def _own(told: _Trace) -> Trajectory | None:
    skeleton = told.turns[0].metadata.get(FIELD) if told.turns else None
    if not isinstance(skeleton, dict):
        return None
    tokens = [*told.turns[-1].prompt_token_ids, *told.turns[-1].completion_token_ids]
    texts = "".join(_text(turn) for turn in told.turns)
    return restored(skeleton, tokens, texts, [turn.per_token_logps for turn in told.turns])


def _foreign(told: _Trace) -> Converted:
    """One trajectory of turns each of which begins with what went before. Raises ConfigError for a trace with forks."""
    segments: list[Segment] = []
    calls: list[CallRecord] = []
    known: list[int] = []
    for turn in told.turns:
        if turn.prompt_token_ids[: len(known)] != known:
            raise ConfigError(f"turn {turn.node_id} does not go on from the one before; give one trace for each branch")
        if known:
            calls.append(CallRecord(len(calls), segments[-1].text))
        new = tuple(turn.prompt_token_ids[len(known) :])
        segments.append(Segment(Author.TOOL if known else Author.PROMPT, new))
        segments.append(
            Segment(Author.MODEL, tuple(turn.completion_token_ids), tuple(turn.per_token_logps), _text(turn))
        )
        known = [*turn.prompt_token_ids, *turn.completion_token_ids]
    lost = ["texts of prompts and observations, how it ended, faults, rewards"]
    if any(_partly_masked(turn) for turn in told.turns):
        lost.append("masks of single turns: a trajectory's turns count all, or none")
    name = told.turns[0].node_id.partition("/")[0] if told.turns else "trace"
    return Converted(foreign(name, segments, 1, calls), tuple(lost))


def _partly_masked(turn: _Turn) -> bool:
    return not all(turn.loss_mask[len(turn.prompt_token_ids) :])


def _text(turn: _Turn) -> str:
    choices = turn.response.get("choices") or [{}]
    return str((choices[0].get("message") or {}).get("content") or "")
