"""ATIF 1.8, the Agent Trajectory Interchange Format of Harbor: one JSON document a trajectory.

https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, Trajectory
from verl_tool.trajectories.skeleton import FIELD, Carried, restored, skeleton_of
from verl_tool.trajectories.turns import Converted, Json, Turn, foreign, prompt_text, turns_of, validated

SCHEMA = "ATIF-v1.8"
_NOTE = "The first step is the prompt as the chat template rendered it."


class _Base(BaseModel):
    """Documents of later versions may have more."""

    model_config = ConfigDict(extra="ignore")


class _Metrics(_Base):
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class _Result(_Base):
    content: str | list[Json] | None = None


class _Observation(_Base):
    results: list[_Result]


class _ToolCall(_Base):
    function_name: str
    arguments: Json


class _Step(_Base):
    source: str
    message: str | list[Json]
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None


class _Document(_Base):
    schema_version: str = Field(pattern=r"^ATIF-v1\.")
    trajectory_id: str | None = None
    session_id: str | None = None
    steps: list[_Step]
    extra: Json | None = None


def write(trajectory: Trajectory) -> Converted:
    """The document; it has all that the record has, but for the bytes of images."""
    turns = turns_of(trajectory)
    steps: list[Json] = [{"step_id": 1, "source": "user", "message": prompt_text(trajectory)}]
    steps += [_agent_step(trajectory, turn, number) for number, turn in enumerate(turns, start=2)]
    texts = {*range(trajectory.prompt_segments)}
    for turn in turns:
        behind = range(turn.index + 1, turn.index + 1 + len(turn.shown))
        texts |= {turn.index, *(i for i in behind if trajectory.segments[i].author is Author.TOOL)}
    carried = Carried(
        turns[-1].index if turns else -1, texts, {turn.index for turn in turns if _finite(turn.model.log_probs)}
    )
    final: Json = {
        "total_prompt_tokens": sum(_tokens_before(trajectory, turn) for turn in turns),
        "total_completion_tokens": sum(len(turn.model.tokens) for turn in turns),
        "total_steps": len(steps),
    }
    if trajectory.reward is not None:
        final["extra"] = {"reward": trajectory.reward}
    document = {
        "schema_version": SCHEMA,
        "trajectory_id": trajectory.trajectory_id,
        "agent": {"name": "verl-tool", "version": version("verl-tool")},
        "steps": steps,
        "notes": _NOTE,
        "final_metrics": final,
        "extra": {FIELD: skeleton_of(trajectory, carried)},
    }
    images = any(segment.image is not None for segment in trajectory.segments)
    return Converted(document, ("images (their SHA-256 only)",) if images else ())


def read(document: Any) -> Converted:
    """The trajectory: the one that was written, or what another project's document tells. Raises ConfigError."""
    parsed = validated(_Document, document, "this is no ATIF document")
    own = _own(parsed)
    return Converted(own) if own is not None else _foreign(parsed)


def _agent_step(trajectory: Trajectory, turn: Turn, number: int) -> Json:
    model = turn.model
    metrics: Json = {
        "prompt_tokens": _tokens_before(trajectory, turn),
        "completion_tokens": len(model.tokens),
        "prompt_token_ids": _ids(trajectory.segments[: turn.index]),
        "completion_token_ids": list(model.tokens),
    }
    if _finite(model.log_probs):
        metrics["logprobs"] = list(model.log_probs or ())
    step: Json = {"step_id": number, "source": "agent", "message": model.text, "metrics": metrics}
    ids = [f"call_{number}_{i}" for i in range(len(turn.calls))]
    if turn.calls:
        step["tool_calls"] = [
            {"tool_call_id": name, "function_name": call.name, "arguments": json.loads(call.arguments)}
            for name, call in zip(ids, turn.calls, strict=True)
        ]
    if turn.record is not None or turn.observation:
        # Several calls of an action are answered by one observation.
        source = {"source_call_id": ids[0]} if len(ids) == 1 else {}
        step["observation"] = {"results": [{**source, "content": turn.observation}]}
    return step


def _own(told: _Document) -> Trajectory | None:
    skeleton = (told.extra or {}).get(FIELD)
    if not isinstance(skeleton, dict) or not told.steps:
        return None
    agents = [step for step in told.steps if step.source == "agent"]
    if any(step.metrics is None for step in agents):
        return None
    metrics = [step.metrics for step in agents if step.metrics is not None]
    tokens = [*(metrics[-1].prompt_token_ids or ()), *(metrics[-1].completion_token_ids or ())] if metrics else []
    text = "".join(_text(step.message) + _observed(step) for step in told.steps)
    return restored(skeleton, tokens, text, [each.logprobs for each in metrics if each.logprobs is not None])


def _foreign(told: _Document) -> Converted:
    """Segments by who wrote them. Tokens are known as far as each prompt begins with what went before."""
    segments: list[Segment] = []
    calls: list[CallRecord] = []
    prompt, exact = 0, True
    known: list[int] = []
    for step in told.steps:
        if step.source != "agent":
            author = Author.TOOL if prompt else Author.PROMPT
            segments.append(Segment(author, (), text=_text(step.message)))
            continue
        before, written = _token_ids(step)
        exact = exact and written is not None and before[: len(known)] == known and len(before) >= len(known)
        if exact and segments:
            # What came since the model's last turn; the first of its texts has the tokens of all.
            first = max((i for i, s in enumerate(segments) if s.is_turn), default=-1) + 1
            new = tuple(before[len(known) :])
            segments[first:] = _with_tokens(segments[first:], new, Author.TOOL if prompt else Author.PROMPT)
        prompt = prompt or len(segments)
        log_probs = step.metrics.logprobs if step.metrics is not None and exact else None
        text = (step.reasoning_content or "") + _text(step.message)
        segments.append(Segment(Author.MODEL, tuple(written or ()) if exact else (), _tuple(log_probs), text))
        known = [*before, *(written or ())]
        if step.tool_calls or step.observation is not None:
            names = tuple(dict.fromkeys(call.function_name for call in step.tool_calls or ()))
            calls.append(CallRecord(len(calls), text, _observed(step), names=names))
            segments.append(Segment(Author.TOOL, (), text=_observed(step)))
    lost = ["how it ended, faults, rewards"]
    if not exact:
        segments = [Segment(s.author, (), text=s.text) for s in segments]
        lost.append("tokens, log-probabilities and masks (the document has none for every turn)")
    name = told.trajectory_id or told.session_id or "atif"
    return Converted(foreign(name, segments, prompt or len(segments), calls), tuple(lost))


def _with_tokens(segments: Sequence[Segment], tokens: tuple[int, ...], author: Author) -> list[Segment]:
    if not segments:
        return [Segment(author, tokens)] if tokens else []
    head, *rest = segments
    return [Segment(head.author, tokens, text=head.text), *rest]


def _token_ids(step: _Step) -> tuple[list[int], list[int] | None]:
    metrics = step.metrics
    if metrics is None or metrics.prompt_token_ids is None or metrics.completion_token_ids is None:
        return [], None
    return metrics.prompt_token_ids, metrics.completion_token_ids


def _observed(step: _Step) -> str:
    return "".join(_text(result.content) for result in step.observation.results) if step.observation else ""


def _text(content: str | list[Json] | None) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return content or ""


def _tuple(values: list[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


def _finite(log_probs: tuple[float, ...] | None) -> bool:
    """Whether JSON has such numbers."""
    return log_probs is not None and all(map(math.isfinite, log_probs))


def _ids(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.tokens]


def _tokens_before(trajectory: Trajectory, turn: Turn) -> int:
    return sum(len(segment.tokens) for segment in trajectory.segments[: turn.index])
