"""The tool ``delegate``, which the loop runs itself: a sub-agent does a task in its own context."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.agent_loop.actions import Action, ParsedTurn
from verl_tool.agent_loop.function_arguments import ArgumentsError, CheckedFunction
from verl_tool.agent_loop.function_tools import ENDINGS
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import StopReason
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder
from verl_tool.formats import Format
from verl_tool.formats.scan import THOUGHTS
from verl_tool.formats.tags import Tag, TagFormat


def delegate(task: str) -> str:
    """Have a sub-agent do a task, and get its answer. It has your tools and your workspace, and sees nothing of this
    conversation: write all that it needs to know into the task. Call it alone."""
    return task.strip()


_FUNCTION = CheckedFunction("delegate", delegate)
_TAG = TagFormat("delegate", [Tag.named("delegate")])
DELEGATE = _FUNCTION.describe().model_copy(update={"usage": _TAG.usage([_FUNCTION.describe()])})
"""Description of the tool for a prompt. Its usage text teaches the tag ``<delegate>…</delegate>``."""
DELEGATE_STOP = _TAG.stop[0]


def can_call_delegate(fmt: Format) -> bool:
    """Return whether a call in `fmt` can name the tool. A user's format without ``write`` is trusted."""
    write = getattr(fmt, "write", None)
    return write is None or any(call.name == DELEGATE.name for call in fmt.find_calls(write(DELEGATE.name, "…")))


def is_delegation(action: Action, options: EpisodeOptions) -> bool:
    """Return whether an action calls ``delegate``."""
    return options.subagents and any(call.name == DELEGATE.name for call in action.sent_calls)


def read_task(action: Action, builder: TrajectoryBuilder, options: EpisodeOptions) -> str:
    """Return the task that an action delegates. Raises ArgumentsError, with a message for the model, if it cannot be
    run."""
    calls = action.sent_calls
    if len(calls) > 1:
        raise ArgumentsError(f"delegate must be the only call of a turn, and there are {len(calls)}. None was run.")
    if calls[0].error is not None:
        raise ArgumentsError(calls[0].error)
    task = str(_FUNCTION.run(calls[0]))
    if not task:
        raise ArgumentsError("The task is empty. Write what the sub-agent shall do.")
    if builder.depth >= options.max_subagent_depth:
        raise ArgumentsError("A sub-agent at this depth cannot delegate. Do the task yourself.")
    if builder.num_subagents >= options.max_subagents:
        raise ArgumentsError(f"All {options.max_subagents} sub-agents are used up. Do the task yourself.")
    return task


def check_prompt_fits(prompt_ids: Sequence[int], limit: int | None, max_model_len: int | None) -> None:
    """Raise ArgumentsError if a sub-agent's prompt is longer than `limit`, or leaves no tokens for an answer."""
    limits = [n for n in (limit, None if max_model_len is None else max_model_len - 1) if n is not None]
    if len(prompt_ids) > min(limits, default=len(prompt_ids)):
        raise ArgumentsError(
            f"The sub-agent's prompt has {len(prompt_ids)} tokens, and at most {min(limits)} fit. Write a shorter task."
        )


def is_finish(action: Action) -> bool:
    """Return whether a sub-agent's action ends the sub-agent. It must not reach the tools, which would end the whole
    trajectory."""
    return [call.name in ENDINGS for call in action.sent_calls] == [True]


def answer_of(turn: ParsedTurn | None, stop: StopReason) -> str:
    """Return the answer that the main agent gets from a sub-agent that stopped for `stop` after `turn`."""
    text = "" if turn is None else turn.text
    if turn is not None and is_finish(turn.action):
        [call] = turn.action.sent_calls
        text = turn.action.text[: call.start].strip() or call.input
    for mark in THOUGHTS.values():
        text = text.rpartition(mark)[2]
    if stop is StopReason.ANSWERED and text.strip():
        return text.strip()
    return f"The sub-agent gave no answer ({stop.value})."
