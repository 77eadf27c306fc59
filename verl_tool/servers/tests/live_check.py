"""Runs what the checks of all tools list: cases, their deadlines, the table, and the exit code.

A check is data: `LiveCase`s of `LiveTurn`s, each an action and what its answer must be.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind, StepRequest, StepResult, ToolDescription

FAILED, UNUSABLE = 1, 2
"""Exit codes: a case failed; there is no server or no such tool to check."""
WAITS = 120.0
"""Deadline in seconds of a case that waits for the server's own limits."""


class CheckFailed(AssertionError):
    """The server answered, but not as it should."""


@dataclass(frozen=True)
class LiveTurn:
    """One action and what its answer must be."""

    action: str
    contains: tuple[str | re.Pattern[str], ...] = ()
    lacks: tuple[str, ...] = ()
    valid: bool | None = True
    """None: either will do."""
    done: bool | None = None
    fault: FaultKind | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    """None: the turn's place, or no number where the trajectory has one turn only."""
    finish: bool = False
    problem: Callable[[StepResult], str] | None = None
    """What else is wrong with an answer; empty if nothing is."""

    def verify(self, result: StepResult) -> None:
        """Raise CheckFailed if `result` is not as it must be."""
        answer = f"in the answer {result.observation!r:.300} to {self.action!r:.100}"
        if (result.fault.kind if result.fault else None) != self.fault:
            raise CheckFailed(f"fault {result.fault}; expected {self.fault} {answer}")
        if self.fault is not None:
            return
        for text in self.contains:
            if not (text in result.observation if isinstance(text, str) else text.search(result.observation)):
                raise CheckFailed(f"{text!r} is missing {answer}")
        for text in self.lacks:
            if text in result.observation:
                raise CheckFailed(f"{text!r} stands {answer}")
        for name in ("valid", "done"):
            if getattr(self, name) not in (None, getattr(result, name)):
                raise CheckFailed(f"{name}={getattr(result, name)} {answer}")
        if self.problem is not None and (words := self.problem(result)):
            raise CheckFailed(f"{words} {answer}")


Trajectory = Sequence[LiveTurn]
Batches = Iterable[Sequence[Trajectory]]
"""One batch after the other; the n-th turns of a batch's trajectories are one request."""


@dataclass(frozen=True)
class Target:
    """The tool that is checked, and the address of its server."""

    tool: ToolDescription
    url: str


def one_by_one(*trajectories: LiveTurn | Trajectory) -> Batches:
    """Each trajectory alone."""
    return [[[each] if isinstance(each, LiveTurn) else each] for each in trajectories]


def together(*trajectories: LiveTurn | Trajectory) -> Batches:
    """All trajectories in one batch."""
    return [[trajectory for [trajectory] in one_by_one(*trajectories)]]


@dataclass(frozen=True)
class LiveCase:
    """One thing that must hold."""

    name: str
    batches: Batches | Callable[[Target], Batches]
    seconds: float = 30.0
    """Deadline of the case."""
    holds: Callable[[Sequence[str]], bool] = lambda observations: True
    """Of the observations of all turns."""


def examples(
    *contains: str,
    name: str = "every example action of GET /tools",
    seconds: float = 30.0,
    without: str | None = None,
    done: bool | None = None,
    extra: Mapping[str, Any] | None = None,
) -> LiveCase:
    """Each example of the tool, but those that hold the text `without`; the rest is as in `LiveTurn`."""

    def batches(target: Target) -> Batches:
        actions = [each for each in target.tool.example_actions if without is None or without not in each]
        return one_by_one(*(LiveTurn(action, contains, done=done, extra=extra or {}) for action in actions))

    return LiveCase(name, batches, seconds)


def call(tool: str, /, **arguments: object) -> str:
    """A call in Hermes' form."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class CheckOutcome:
    """How one case went."""

    case: LiveCase
    seconds: float
    problem: str | None
    """None if it holds."""


async def run_cases(url: str, api_key: str | None, tool_name: str, cases: Sequence[LiveCase]) -> list[CheckOutcome]:
    """Run the cases one after the other. Raises ToolFault or ConfigError if the server cannot be checked at all."""
    longest = max(case.seconds for case in cases)
    async with ToolClient(url, api_key=api_key, timeout=longest, max_retries=3) as client:
        tools = {tool.name: tool for tool in await asyncio.wait_for(client.tools(), 30.0)}
        if tool_name not in tools:
            raise ConfigError(f"the server at {url} has no tool {tool_name!r}; it serves: {', '.join(sorted(tools))}")
        return [await _run_case(case, client, Target(tools[tool_name], client.url)) for case in cases]


async def _run_case(case: LiveCase, client: ToolClient, target: Target) -> CheckOutcome:
    began = time.perf_counter()
    try:
        await asyncio.wait_for(_run_batches(case, client, target), case.seconds)
        problem = None
    except asyncio.TimeoutError:
        problem = f"no answer within {case.seconds:g} s"
    except (CheckFailed, ToolFault) as error:
        problem = str(error)
    return CheckOutcome(case, time.perf_counter() - began, problem)


async def _run_batches(case: LiveCase, client: ToolClient, target: Target) -> None:
    observations: list[str] = []
    for trajectories in case.batches(target) if callable(case.batches) else case.batches:
        ids = [f"check-{uuid.uuid4().hex}" for _ in trajectories]
        for number, column in enumerate(zip_longest(*trajectories)):
            turns = [(each, turn, len(of)) for each, turn, of in zip(ids, column, trajectories, strict=True) if turn]
            results = await client.step([_request(each, turn, number, count) for each, turn, count in turns])
            for (_, turn, _), result in zip(turns, results, strict=True):
                turn.verify(result)
                observations.append(result.observation)
        await client.finish(ids)
    if not observations:
        raise CheckFailed("nothing was asked")
    if not case.holds(observations):
        raise CheckFailed(f"the answers do not fit together: {[each[:100] for each in observations[:8]]}")


def _request(trajectory_id: str, turn: LiveTurn, number: int, count: int) -> StepRequest:
    step = turn.step if turn.step is not None else number if count > 1 else None
    return StepRequest(trajectory_id, turn.action, step, finish=turn.finish, extra=turn.extra)


def print_outcomes(outcomes: Sequence[CheckOutcome], title: str, console: Console) -> None:
    """The outcomes as a table, and a line that sums them up."""
    table = Table(title=title)
    table.add_column("case")
    table.add_column("result")
    table.add_column("seconds", justify="right")
    table.add_column("what was wrong", overflow="fold")
    for outcome in outcomes:
        verdict = "[green]holds[/green]" if outcome.problem is None else "[red]fails[/red]"
        table.add_row(escape(outcome.case.name), verdict, f"{outcome.seconds:.2f}", escape(outcome.problem or ""))
    console.print(table)
    failed = sum(outcome.problem is not None for outcome in outcomes)
    console.print(f"{len(outcomes) - failed} of {len(outcomes)} hold" if failed else f"all {len(outcomes)} hold")


def check(url: str, api_key: str | None, tool_name: str, cases: Sequence[LiveCase]) -> None:
    """Run the cases and print the table. Raises typer.Exit with `FAILED` or `UNUSABLE`."""
    console = Console()
    try:
        outcomes = asyncio.run(run_cases(url, api_key, tool_name, cases))
    except (ToolFault, asyncio.TimeoutError) as error:
        console.print(f"No tool server answers at {escape(url)}: {escape(str(error) or 'no answer within 30 s')}")
        console.print(f"Start one with: python -m verl_tool.servers.ray_serve --tool_type {tool_name}")
        raise typer.Exit(UNUSABLE) from error
    except (ConfigError, ValueError) as error:
        console.print(escape(str(error)))
        raise typer.Exit(UNUSABLE) from error
    print_outcomes(outcomes, f"{tool_name} at {url}", console)
    if any(outcome.problem is not None for outcome in outcomes):
        raise typer.Exit(FAILED)


Url = Annotated[str, typer.Option("--url", help="Address of the server; a trailing /get_observation may stand or not.")]
ApiKey = Annotated[
    str | None, typer.Option("--api_key", envvar="VERL_TOOL_API_KEY", help="Bearer token, if the server wants one.")
]
DEFAULT_URL = "http://127.0.0.1:5000/get_observation"


Cases = Sequence[LiveCase] | Callable[..., Sequence[LiveCase]]


def command_line(module: str, command: str, tool_name: str, cases: Cases) -> typer.Typer:
    """The command line of one tool's check, ``<module> <command> --url=…``; it runs if `module` is ``__main__``.

    `cases`: the cases, or a function whose parameters are further options; one of the name ``tool`` names the tool.
    """
    about = f"Check {tool_name} of a live server, case by case."
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=about)

    @app.callback()
    def keep_the_command_name() -> None:
        """Typer would leave out the name of a single command."""

    def run(url: str, api_key: str | None, **options: Any) -> None:
        check(url, api_key, options.get("tool", tool_name), cases(**options) if callable(cases) else cases)

    def parameters(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None: ...

    sources: list[Callable[..., Any]] = [parameters, *([cases] if callable(cases) else [])]
    found = [p for source in sources for p in inspect.signature(source, eval_str=True).parameters.values()]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in found]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in keywords}
    app.command(command, help=about)(run)
    if module == "__main__":
        app()
    return app
