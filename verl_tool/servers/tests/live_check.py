"""What the checks of all tools share: cases, their deadlines, the table, and the exit code."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import StepRequest, StepResult, ToolDescription

FAILED, UNUSABLE = 1, 2
"""Exit codes: a case failed; there is no server or no such tool to check."""


class CheckFailed(AssertionError):
    """The server answered, but not as it should."""


class Probe:
    """A client that fails a case at the first answer that is not as it should be."""

    def __init__(self, client: ToolClient, tool: ToolDescription) -> None:
        self.client = client
        self.tool = tool

    def new_id(self) -> str:
        """An id that no trajectory had before."""
        return f"check-{uuid.uuid4().hex}"

    async def answers(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Answers in the order of the requests; none may be a fault."""
        results = await self.client.step(requests)
        for result in results:
            if result.fault is not None:
                raise CheckFailed(f"fault {result.fault.kind.value}: {result.fault.message}")
        return results

    async def answer(
        self,
        action: str,
        *,
        trajectory_id: str | None = None,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """The answer to one action, of a trajectory of its own if none is given."""
        request = StepRequest(trajectory_id or self.new_id(), action, step, extra=extra or {})
        return (await self.answers([request]))[0]

    async def expect(self, action: str, *expected: str, extra: Mapping[str, Any] | None = None) -> StepResult:
        """The answer is valid and holds each of the texts."""
        result = await self.answer(action, extra=extra)
        if not result.valid:
            raise CheckFailed(f"not recognised: {action!r:.200}; answer: {result.observation!r:.300}")
        for text in expected:
            if text not in result.observation:
                raise CheckFailed(f"{text!r} is missing in the answer {result.observation!r:.300}")
        return result

    async def hides(self, action: str, *unwanted: str) -> StepResult:
        """The answer holds none of the texts."""
        result = await self.answer(action)
        for text in unwanted:
            if text in result.observation:
                raise CheckFailed(f"{text!r} stands in the answer {result.observation!r:.300}")
        return result


@dataclass(frozen=True)
class LiveCase:
    """One thing that must hold."""

    name: str
    run: Callable[[Probe], Awaitable[object]]
    seconds: float = 30.0
    """Deadline of the case."""


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
        probe = Probe(client, tools[tool_name])
        return [await _run_case(case, probe) for case in cases]


async def _run_case(case: LiveCase, probe: Probe) -> CheckOutcome:
    began = time.perf_counter()
    try:
        await asyncio.wait_for(case.run(probe), case.seconds)
        problem = None
    except asyncio.TimeoutError:
        problem = f"no answer within {case.seconds:g} s"
    except (CheckFailed, ToolFault) as error:
        problem = str(error)
    return CheckOutcome(case, time.perf_counter() - began, problem)


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


def command_line(command: str, tool_name: str, cases: Sequence[LiveCase], about: str) -> typer.Typer:
    """The command line of one tool's check: ``<module> <command> --url=…``."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=about)

    @app.callback()
    def keep_the_command_name() -> None:
        """Typer would leave out the name of a single command."""

    @app.command(command, help=about)
    def run(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
        check(url, api_key, tool_name, cases)

    return app
