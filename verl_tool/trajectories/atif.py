"""ATIF 1.8, the Agent Trajectory Interchange Format of Harbor: one JSON document a trajectory.

https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, Trajectory
from verl_tool.trajectories.skeleton import FIELD, Carried, restored, skeleton_of
from verl_tool.trajectories.turns import (
    Converted,
    Json,
    Turn,
    foreign,
    is_observation,
    prompt_text,
    turns_of,
    validated,
)

SCHEMA = "ATIF-v1.8"
AGENT = "verl-tool"
_NOTE = (
    "The first step is the prompt as the chat template rendered it. Messages are texts as sampled, with their calls. "
    "A step with extra.verl_tool.row is in that training row: its prompt is that row's, not all that came before."
)
_THOUGHTS = re.compile(r"(\s*(?:<think>|\[THINK\])\s*)?(.*?)(\s*(?:</think>|\[/THINK\])\s*)", re.DOTALL)


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
    extra: Json | None = None


class _Document(_Base):
    schema_version: str = Field(pattern=r"^ATIF-v1\.")
    trajectory_id: str | None = None
    session_id: str | None = None
    steps: list[_Step]
    extra: Json | None = None


def write(trajectory: Trajectory, model_name: str | None = None) -> Converted:
    """The document; it has all that the record has, but for the bytes of images."""
    turns = turns_of(trajectory)
    agent = {"name": AGENT, "version": version("verl-tool")} | ({"model_name": model_name} if model_name else {})
    steps: list[Json] = [{"step_id": 1, "source": "user", "message": prompt_text(trajectory)}]
    texts = {*range(trajectory.prompt_segments)}
    by_index = {turn.index: turn for turn in turns}
    for index in range(trajectory.prompt_segments, len(trajectory.segments)):
        segment = trajectory.segments[index]
        if turn := by_index.get(index):
            steps.append(_turn_step(trajectory, turn, len(steps) + 1))
            behind = range(index + 1, index + 1 + len(turn.shown))
            texts |= {index, *(i for i in behind if is_observation(trajectory.segments[i]))}
        elif segment.summary and not segment.agent:
            steps.append(_agent_step(trajectory, index, len(steps) + 1))
    finite = {turn.index for turn in turns if _finite(turn.model.log_probs)}
    # The prompt of the last turn has all tokens before it only if no row has a prompt of its own.
    carried = Carried(turns[-1].index if turns and not trajectory.contexts else -1, texts, finite)
    document = {
        "schema_version": SCHEMA,
        "session_id": trajectory.trajectory_id,
        "trajectory_id": trajectory.trajectory_id,
        "agent": agent,
        "steps": steps,
        "notes": _NOTE,
        "final_metrics": _final_metrics(trajectory, steps),
        "extra": {FIELD: skeleton_of(trajectory, carried)},
    }
    numbers = [number for turn in turns for number in turn.subagents]
    if numbers:
        document["subagent_trajectories"] = [_subagent(trajectory, number, agent) for number in numbers]
    images = any(segment.image is not None for segment in trajectory.segments)
    return Converted(document, ("images (their SHA-256 only)",) if images else ())


def read(document: Any) -> Converted:
    """The trajectory: the one that was written, or what another project's document tells. Raises ConfigError."""
    parsed = validated(_Document, document, "this is no ATIF document")
    own = _own(parsed)
    return Converted(own) if own is not None else _foreign(parsed)


def _agent_step(trajectory: Trajectory, index: int, number: int) -> Json:
    """A step with what the model wrote in one segment, and what it was fed before."""
    segment = trajectory.segments[index]
    prompt = _prompt_of(trajectory, index)
    metrics: Json = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(segment.tokens),
        "prompt_token_ids": prompt,
        "completion_token_ids": list(segment.tokens),
    }
    if _finite(segment.log_probs):
        metrics["logprobs"] = list(segment.log_probs or ())
    step: Json = {"step_id": number, "source": "agent", "message": segment.text, "metrics": metrics}
    extra: Json = {}
    if found := _THOUGHTS.match(segment.text):
        opening, step["reasoning_content"], closing = found.groups(default="")
        step["message"], extra["thought_marks"] = segment.text[found.end() :], [opening, closing]
    if trajectory.contexts:
        extra |= {"row": segment.row} | ({"summary": True} if segment.summary else {})
        if segment.row:
            extra["row_started_by"] = trajectory.contexts[segment.row - 1].reason
    return step | ({"extra": {FIELD: extra}} if extra else {})


def _turn_step(trajectory: Trajectory, turn: Turn, number: int) -> Json:
    step = _agent_step(trajectory, turn.index, number)
    ids = [f"call_{number}_{i}" for i in range(len(turn.calls))]
    if turn.calls:
        step["tool_calls"] = [
            {"tool_call_id": name, "function_name": call.name, "arguments": json.loads(call.arguments)}
            for name, call in zip(ids, turn.calls, strict=True)
        ]
    if turn.record is not None or turn.observation or turn.subagents:
        # Several calls of an action are answered by one observation.
        result: Json = {"source_call_id": ids[0]} if len(ids) == 1 else {}
        result["content"] = turn.observation
        if turn.subagents:
            references = [{"trajectory_id": _subagent_id(trajectory, each)} for each in turn.subagents]
            result["subagent_trajectory_ref"] = references
        step["observation"] = {"results": [result]}
    return step


def _subagent(trajectory: Trajectory, number: int, agent: Json) -> Json:
    """The document of a sub-agent. A record has the tokens of its prompt, and no text of them."""
    places = [i for i, segment in enumerate(trajectory.segments) if segment.agent == number]
    row = trajectory.segments[places[0]].row
    tokens = len(trajectory.contexts[row - 1].tokens) if row else 0
    steps: list[Json] = [{"step_id": 1, "source": "user", "message": f"[{tokens} tokens, whose text is not recorded]"}]
    for place in places:
        segment = trajectory.segments[place]
        if segment.author is Author.MODEL:
            steps.append(_agent_step(trajectory, place, len(steps) + 1))
        elif segment.author is Author.TOOL and len(steps) > 1:
            observation = steps[-1].setdefault("observation", {"results": []})
            observation["results"].append({"content": segment.text})
    return {
        "schema_version": SCHEMA,
        "trajectory_id": _subagent_id(trajectory, number),
        "agent": agent,
        "steps": steps,
    }


def _subagent_id(trajectory: Trajectory, number: int) -> str:
    return f"{trajectory.trajectory_id}/agent_{number}"


def _prompt_of(trajectory: Trajectory, index: int) -> list[int]:
    """The tokens that the model was fed for the segment at `index`: those of its row."""
    row = trajectory.segments[index].row
    before = [segment for segment in trajectory.segments[trajectory.prompt_segments : index] if segment.row == row]
    return [*(trajectory.contexts[row - 1].tokens if row else trajectory.prompt_ids), *_ids(before)]


def _final_metrics(trajectory: Trajectory, steps: Sequence[Json]) -> Json:
    """Totals of the steps; those of sub-agents are in their documents."""
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    final: Json = {
        "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
        "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
        "total_steps": len(steps),
    }
    return final | ({"extra": {"reward": trajectory.reward}} if trajectory.reward is not None else {})


def _own(told: _Document) -> Trajectory | None:
    skeleton = (told.extra or {}).get(FIELD)
    if not isinstance(skeleton, dict) or not told.steps:
        return None
    steps = [step for step in told.steps if not _own_fields(step).get("summary")]
    agents = [step for step in steps if step.source == "agent"]
    if any(step.metrics is None for step in agents):
        return None
    metrics = [step.metrics for step in agents if step.metrics is not None]
    last = metrics[-1] if metrics and not skeleton.get("contexts") else _Metrics()
    tokens = [*(last.prompt_token_ids or ()), *(last.completion_token_ids or ())]
    text = "".join(_written(step) + _observed(step) for step in steps)
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
        text = _written(step)
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


def _own_fields(step: _Step) -> Json:
    fields = (step.extra or {}).get(FIELD)
    return fields if isinstance(fields, dict) else {}


def _written(step: _Step) -> str:
    """The text of a step, with its thoughts between the marks that the model wrote."""
    marks = _own_fields(step).get("thought_marks")
    opening, closing = map(str, marks) if isinstance(marks, list) and len(marks) == 2 else ("", "")
    return opening + (step.reasoning_content or "") + closing + _text(step.message)


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
