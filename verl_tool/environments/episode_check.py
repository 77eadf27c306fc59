"""Play one episode of an environment as a tool server does, without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from verl_tool.formats import HERMES
from verl_tool.protocol import ENVIRONMENT_FIELD, KEEP_FIELD, VERDICT_FIELD, Opening, StepResult
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools.base import Tool
from verl_tool.servers.tools.typed.example import example_arguments

_TRAJECTORY = "check"
_WORD = "Hello."
"""The turn in an environment without tools if none is given."""
_VISIBLE_CHARACTERS = 600
"""Of each text that is printed."""


@dataclass
class EpisodeReport:
    """What an environment did in one episode."""

    opening: Opening | None = None
    answers: list[tuple[str, StepResult, float]] = field(default_factory=list)
    """Turn, answer and seconds of each request; the opening has no turn."""
    verdict: StepResult | None = None

    @property
    def is_judged(self) -> bool:
        """Whether the episode began, no request failed, and there is a reward."""
        failed = any(result.fault is not None for _, result, _ in self.answers)
        return not failed and self.verdict is not None and self.verdict.reward is not None

    def print(self, console: Console) -> None:
        """Print the episode."""
        for message in self.opening.messages if self.opening else ():
            console.print(f"[bold]{escape(str(message.get('role')))}[/]: {_cut(str(message.get('content')))}")
        for tool in self.opening.tools if self.opening else ():
            console.print(f"[bold]tool[/] {escape(tool.name)}: {_cut(tool.description)}")
        if self.opening is not None:
            console.print(f"each turn is an action: {'yes' if self.opening.every_turn else 'no'}")
        for turn, result, seconds in self.answers:
            if turn:
                console.print(f"[bold]model[/]: {_cut(turn)}")
            console.print(f"[bold]{result.role or 'tool'}[/] ({seconds * 1000:.0f} ms): {_describe(result)}")
        if self.verdict is not None:
            console.print(f"[bold]verdict[/]: {_describe(self.verdict)}")


async def play_episode(
    tool: Tool, arguments: Mapping[str, Any], turns: Sequence[str], judged_by: Mapping[str, Any], seconds: float
) -> EpisodeReport:
    """Begin with the row's `arguments`, send `turns` until one ends the episode, and have it judged.

    Without turns, each tool of the opening is called once with arguments made from its schema. A request that fails
    ends the episode; its fault is in the report. `seconds` is the deadline of each request.
    """
    report = EpisodeReport()
    async with InProcessTools([tool], seconds) as tools:

        async def send(turn: str, **extra: Any) -> StepResult:
            started = time.monotonic()
            step = len(report.answers)
            result = await tools.call(_TRAJECTORY, turn, step=step, extra={KEEP_FIELD: True, **extra})
            report.answers.append((turn, result, time.monotonic() - started))
            return result

        result = await send("", **{ENVIRONMENT_FIELD: dict(arguments)})
        report.opening = result.opening
        for turn in turns or example_turns(result.opening):
            if result.fault is not None or result.done:
                break
            result = await send(turn)
        if result.fault is None:
            extra = {VERDICT_FIELD: {"data": dict(judged_by)}}
            report.verdict = await tools.call(_TRAJECTORY, "", step=len(report.answers), extra=extra)
        await tools.call(_TRAJECTORY, "", finish=True)
    return report


def example_turns(opening: Opening | None) -> list[str]:
    """Return a call of each tool, or a word if there are none."""
    tools = opening.tools if opening is not None else []
    return [HERMES.write_call(tool.name, example_arguments(tool.parameters)) for tool in tools] or [_WORD]


def _describe(result: StepResult) -> str:
    if result.fault is not None:
        return f"[red]{result.fault.kind.value}[/]: {_cut(result.fault.message)}"
    reward = "" if result.reward is None else f" [green]reward {result.reward:g}[/]"
    ended = " [yellow]end[/]" if result.done else ""
    numbers = "" if not result.metrics else escape(f" {dict(result.metrics)}")
    return f"{_cut(result.observation)}{'' if result.valid else ' (invalid)'}{reward}{ended}{numbers}"


def _cut(text: str) -> str:
    return escape(text if len(text) <= _VISIBLE_CHARACTERS else text[:_VISIBLE_CHARACTERS] + "…")
