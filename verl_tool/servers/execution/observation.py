"""Build the observation of an action: merge the results of its calls, or say why there are none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from verl_tool.content.parts import Part, TextPart, as_parts, parts_of, reject_too_much, tagged
from verl_tool.formats import Call
from verl_tool.formats.base import render_parts
from verl_tool.formats.find import last_tag
from verl_tool.protocol import Role, StepRequest, StepResult, ToolDescription
from verl_tool.servers.execution.calls import MatchedCall, is_among
from verl_tool.servers.execution.clean_text import clean_text
from verl_tool.servers.tools.base import Tool, ToolResult


def merge(trajectory_id: str, matched: Sequence[MatchedCall], results: Sequence[ToolResult]) -> StepResult:
    """Merge the results of all calls of an action into one answer.

    Texts are concatenated, rewards and metrics are added up, and the action is valid if one of its calls was. If a
    result has parts, all images and audios are kept at their places in the text, else only the last of each. `results`
    may be shorter than `matched` if a call ended the trajectory.

    Raises ContentError if the images and audios are together too many or too large, or cannot be read.
    """
    # zip stops where the results do.
    calls = [(match.call, result) for match, result in zip(matched, results, strict=False)]
    if any(result.parts for result in results):
        text, image, audio = _with_parts(calls)
    elif len(results) == 1:
        return _alone(trajectory_id, *calls[0])
    else:
        text = "".join(_render(*each) for each in calls)
        image, audio = (_last([getattr(result, name) for result in results]) for name in ("image", "audio"))
    rewards = [result.reward for result in results if result.reward is not None]
    reasons = [result.invalid_reason for result in results if result.invalid_reason]
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return StepResult(
        trajectory_id,
        text,
        done=any(result.done for result in results),
        valid=any(result.valid for result in results),
        reward=sum(rewards) if rewards else None,
        image=image,
        audio=audio,
        invalid_reason="; ".join(reasons) or None,
        metrics=metrics or None,
        role=_role(results),
    )


def _alone(trajectory_id: str, call: Call, result: ToolResult) -> StepResult:
    """Convert the result of a single call, which is the usual case."""
    return StepResult(
        trajectory_id,
        _render(call, result),
        result.done,
        result.valid,
        None,
        result.reward,
        result.image,
        result.audio,
        result.invalid_reason,
        result.metrics or None,
        _role([result]),
    )


def _role(results: Sequence[ToolResult]) -> Role | None:
    """Return ``user`` if a user answered all calls."""
    return "user" if all(result.role == "user" for result in results) else None


def unrunnable(reason: str) -> ToolResult:
    """Return the answer to a call that its format or its tool cannot parse."""
    return ToolResult(f"Error: {reason}", valid=False, invalid_reason=reason)


def with_error_metric(result: ToolResult) -> ToolResult:
    """Add the metric `error` to a failed result, so that it reaches the trajectory's record."""
    return replace(result, metrics={**result.metrics, "error": 1.0}) if result.error else result


def not_run(limit: int) -> ToolResult:
    """Return the answer to a call beyond the `limit` of one action."""
    words = f"at most {limit} call{'s' if limit > 1 else ''} of one turn are run"
    return ToolResult(
        f"Error: {words}; this one was not. Send it in your next turn.", valid=False, invalid_reason=words
    )


def not_understood(
    request: StepRequest,
    tools: Sequence[Tool],
    unknown: Sequence[Call],
    done: bool,
    formats: Collection[str] | None = None,
    described: Sequence[ToolDescription] = (),
) -> StepResult:
    """Return the answer to an action in which no tool found a call. `unknown` are calls of unknown tools, `formats`
    restricts the formats in which calls are found, and `described` are tools of the trajectory's environment."""
    known = _known([*(tool for tool in tools if not tool.is_environment), *described])
    unknown = unknown or last_tag(request.action)
    if unknown and unknown[0].error is not None:
        reason = unknown[0].error
        text = f"Error: {reason}"
    elif unknown:
        reason = f"unknown tool {unknown[0].name[:80]!r}"
        text = f"Error: {reason}. {known}"
    else:
        reason = "no tool call found"
        text = f"No tool call found. {known} Name the tool in a tag, a code fence or a JSON tool call."
    text = unknown[0].format.render(clean_text(text), unknown[0]) if unknown else _render_text(text, tools, formats)
    return StepResult(request.trajectory_id, text, done, valid=False, invalid_reason=reason)


def too_long(
    request: StepRequest, tools: Sequence[Tool], limit: int, done: bool, formats: Collection[str] | None = None
) -> StepResult:
    """Return the answer to an action of more than `limit` characters."""
    reason = f"the action has {len(request.action)} characters, and at most {limit} are read"
    text = _render_text(f"Error: {reason}; write less in one turn.", tools, formats)
    return StepResult(request.trajectory_id, text, done, valid=False, invalid_reason=reason)


def _render_text(text: str, tools: Sequence[Tool], formats: Collection[str] | None) -> str:
    """Render `text` in the first format of the tools."""
    usable = [fmt for tool in tools for fmt in tool.formats if formats is None or is_among(fmt, formats)]
    return usable[0].render(text) if usable else text


def _with_parts(calls: Sequence[tuple[Call, ToolResult]]) -> tuple[str, object, object]:
    """Return the text, in which tags stand for images and audios, then the images and the audios."""
    visible: list[Part] = []
    for call, result in calls:
        if result.parts:
            parts = [TextPart(clean_text(p.text)) if isinstance(p, TextPart) else p for p in as_parts(result.parts)]
            visible += render_parts(call.format, parts, call)
        else:
            visible += parts_of(_render(call, result), result.image, result.audio)
    reject_too_much(visible)
    text, images, audios = tagged(visible)
    return text, images or None, audios or None


def _render(call: Call, result: ToolResult) -> str:
    """Render a result. A call that ends the trajectory without text gives an empty observation."""
    return "" if result.done and not result.text else call.format.render(clean_text(result.text), call)


def _known(tools: Sequence[Tool | ToolDescription]) -> str:
    return " ".join(["Known tools:", *(f"{tool.name} ({tool.description.rstrip('.')})." for tool in tools)])


def _last(values: Sequence[object]) -> object | None:
    return next((value for value in reversed(values) if value is not None), None)
