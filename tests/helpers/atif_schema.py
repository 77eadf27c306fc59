"""ATIF 1.8, written by hand after the pydantic models of Harbor 0.26 (``harbor/models/trajectories``), which needs a
newer Python than ours: the same fields, none besides, and the same rules."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    extra: Json | None = None


class _Agent(_Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None


class _ToolCall(_Strict):
    tool_call_id: str
    function_name: str
    arguments: Json


class _Reference(_Strict):
    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None


class _Result(_Strict):
    source_call_id: str | None = None
    content: str | None = None
    subagent_trajectory_ref: list[_Reference] | None = None


class _Observation(BaseModel):
    model_config = ConfigDict(extra="forbid")

    results: list[_Result]


class _Metrics(_Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class _Step(_Strict):
    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: str
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class _FinalMetrics(_Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = Field(None, ge=0)


class _Document(_Strict):
    schema_version: Literal["ATIF-v1.8"]
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: _Agent
    steps: list[_Step] = Field(min_length=1)
    notes: str | None = None
    final_metrics: _FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    subagent_trajectories: list[_Document] | None = None


def check_atif(document: Json) -> None:
    """Raise an error if `document` breaks a rule of ATIF 1.8."""
    _check(_Document.model_validate(document))


def _check(document: _Document) -> None:
    assert [step.step_id for step in document.steps] == [*range(1, len(document.steps) + 1)]
    for step in document.steps:
        only_of_agents = (step.model_name, step.reasoning_content, step.tool_calls, step.metrics)
        assert step.source == "agent" or not any(value is not None for value in only_of_agents)
        ids = {call.tool_call_id for call in step.tool_calls or ()}
        results = step.observation.results if step.observation else []
        assert {result.source_call_id for result in results} - {None} <= ids
        for reference in (each for result in results for each in result.subagent_trajectory_ref or ()):
            assert reference.trajectory_id in {each.trajectory_id for each in document.subagent_trajectories or ()}
        if step.metrics is not None and step.metrics.logprobs is not None:
            assert len(step.metrics.logprobs) == len(step.metrics.completion_token_ids or ())
    names = [each.trajectory_id for each in document.subagent_trajectories or ()]
    assert None not in names
    assert len(set(names)) == len(names)
    for subagent in document.subagent_trajectories or ():
        _check(subagent)
