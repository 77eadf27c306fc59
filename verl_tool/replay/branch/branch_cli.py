"""``python -m verl_tool.replay.branch``: from a turn of a stored trajectory on, as it was or edited.

    python -m verl_tool.replay.branch outputs/calculator/grpo step_2.jsonl:17 --turn 2
    python -m verl_tool.replay.branch outputs/calculator/grpo step_2.jsonl:17 --turn 2 --action '1+1<call>' --samples 8
    python -m verl_tool.replay.branch outputs/calculator/grpo step_2.jsonl:17 --values

Exit code 0: the branches are stored; 1: the tools answer otherwise than then; 2: nothing can go on from there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from verl_tool.errors import ConfigError, VerlToolError

if TYPE_CHECKING:
    from verl_tool.replay.branch.branch_point import BranchPlace, BranchPoint, Edit
    from verl_tool.replay.branch.branch_values import TurnValue
    from verl_tool.replay.branch.branches import Branch
    from verl_tool.replay.branch.run_loop import RunLoop

console = Console(stderr=True)
SAMPLES_FOR_VALUES = 8
MAX_DISPLAY_CHARACTERS = 60


@dataclass(frozen=True)
class BranchRequest:
    run: Path
    trained: Path
    """The training whose loop, tools and reward are used: `run`, or `from_run` of an evaluation."""
    samples: int
    tool_server_url: str | None
    endpoint: str | None
    accept_drift: bool


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a training, or of an evaluation (records.jsonl).")],
    trajectory: Annotated[str, typer.Argument(metavar="FILE:LINE", help="Such as step_3.jsonl:17, or branches/….")],
    turn: Annotated[int | None, typer.Option("--turn", help="The turn of the model to go on from, from 1.")] = None,
    action: Annotated[str | None, typer.Option("--action", help="What the model writes in that turn.")] = None,
    observation: Annotated[
        str | None, typer.Option("--observation", help="What answers that turn's call, which is as it was.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Go on from every turn, and estimate its value.")] = False,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, max=1024, help="Continuations. Default: 1; with --values 8 a turn."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of the model. Default: the run's newest weights.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="Serves the model with token ids, as vllm serve; --model names it.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="In place of that with which the run sampled.")
    ] = None,
    tool_server_url: Annotated[
        str | None, typer.Option("--tool_server_url", help="Where calls run. Default: start the run's.")
    ] = None,
    accept_drift: Annotated[
        bool, typer.Option("--accept_drift", help="Go on although the tools answer otherwise than then.")
    ] = False,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="The rows, in place of those that the run's config names.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from_run", help="Of an evaluation: the training whose reward and tools it used.")
    ] = None,
) -> None:
    """Go on from a turn of a stored trajectory."""
    try:
        _check_options(turn, action, observation, values)
        # What is imported here takes seconds.
        from verl_tool.replay.branch.branch_point import BranchPlace, branch_point
        from verl_tool.replay.branch.rebuilt_state import DriftError
        from verl_tool.replay.branch.run_loop import run_loop
        from verl_tool.replay.reexecute import examples
        from verl_tool.replay.stored import StoredRun

        place, stored_run = BranchPlace.read(trajectory), StoredRun(run, tuple(data or ()))
        stored = stored_run.at(place.file, place.line)
        trained = run if stored_run.config is not None else from_run
        if trained is None:
            raise ConfigError(f"{run} does not tell how its answers came about; give --from_run")
        first = branch_point(place, stored, 1 if turn is None else turn, _edit(action, observation))
        turns = range(1, first.trajectory.num_turns + 1) if values else [first.turn]
        points = [branch_point(place, stored, each, first.edit) for each in turns]
        if not os.access(run, os.W_OK):
            raise ConfigError(f"branches are stored in {run}, which may not be written to; copy the run")
        count = samples or (SAMPLES_FOR_VALUES if values else 1)
        loop = run_loop(trained, model, of_validation=stored.of_validation, temperature=temperature)
        console.print(f"model: {loop.model}", highlight=False, soft_wrap=True)
        loop.check_tokens(first.trajectory)
        if count > 1 and loop.sampling.temperature == 0:
            raise ConfigError(
                f"the run sampled with temperature 0, so {count} continuations are one; give --temperature"
            )
        request = BranchRequest(run, trained, count, tool_server_url, endpoint, accept_drift)
        try:
            _report(request, place, loop, _made(request, loop, points), values=values)
        except DriftError as error:
            console.print(f"[bold red]the world has changed:[/bold red] {escape(str(error))}", highlight=False)
            Console().print(examples(error.drifts, of_each=5), markup=False)
            raise typer.Exit(1) from None
    except VerlToolError as error:
        console.print(f"[bold red]cannot go on from there:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def _check_options(turn: int | None, action: str | None, observation: str | None, values: bool) -> None:
    if values and (turn, action, observation) != (None, None, None):
        raise ConfigError("--values goes on from every turn as it was; leave --turn, --action and --observation out")
    if not values and turn is None:
        raise ConfigError("which turn? give --turn K, counted from 1, or --values for every turn")
    if action is not None and observation is not None:
        raise ConfigError("--action and --observation are both given; a branch has one edit, so give just one")


def _edit(action: str | None, observation: str | None) -> Edit | None:
    from verl_tool.replay.branch.branch_point import Edit

    if action is not None:
        return Edit("action", action)
    return None if observation is None else Edit("observation", observation)


def _made(request: BranchRequest, loop: RunLoop, points: Sequence[BranchPoint]) -> list[list[Branch]]:
    """The branches of each point. Raises what is raised on the way; nothing is left running then."""
    from eval_service.evaluation.scoring import Scorer
    from eval_service.model.run_config import run_config
    from verl_tool.replay.regrade import reward_of, tokenizer_of
    from verl_tool.replay.server import served_tools, tool_server

    config, row = run_config(request.trained), points[0].row
    with ExitStack() as stack:
        url = request.tool_server_url
        if loop.options.enable_agent and row.use_tool and row.tools != ():
            with console.status("starting the tool server" if url is None else "looking for the tool server"):
                url = stack.enter_context(tool_server(config, url))
        elif url is not None:
            raise ConfigError("this trajectory uses no tools; leave --tool_server_url out")
        started = url if request.tool_server_url or config.tool_server.start is not None else None
        reward = reward_of(request.trained, None, {}, started, trained=True)
        scorer = Scorer(reward, tokenizer_of(request.trained))
        return asyncio.run(_branched(request, loop, points, url, served_tools(config), scorer))


async def _branched(
    request: BranchRequest, loop: RunLoop, points: Sequence[BranchPoint], url: str | None, tools: list[str], scorer: Any
) -> list[list[Branch]]:
    from verl_tool.client import ToolClient
    from verl_tool.replay.branch.branches import Brancher
    from verl_tool.replay.branch.continuation import Continuation
    from verl_tool.replay.branch.model import model_of
    from verl_tool.replay.branch.rebuilt_state import StateRebuilder
    from verl_tool.replay.reexecute import ObservationComparison

    async with AsyncExitStack() as stack:
        with console.status("loading the model"):
            model = await stack.enter_async_context(model_of(loop, request.endpoint))
        client, states = None, None
        if url is not None:
            settings: dict[str, Any] = dict(loop.options.client_settings())
            key = os.environ.get("VERL_TOOL_API_KEY")
            client = await stack.enter_async_context(ToolClient(url, api_key=key, **settings))
            known = tools or [tool.name for tool in await client.tools()]
            states = StateRebuilder(client, ObservationComparison(known), loop.options, request.accept_drift)
        brancher = Brancher(Continuation(loop, model, client), scorer, states)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        bar = progress.add_task("continuing", total=request.samples * len(points))
        return [await brancher.branches(point, request.samples, lambda: progress.advance(bar)) for point in points]


def _report(
    request: BranchRequest, place: BranchPlace, loop: RunLoop, made: list[list[Branch]], *, values: bool
) -> None:
    """Store what was made, and tell of it."""
    from verl_tool.replay.branch.branch_files import add_branches, branches_path, write_values
    from verl_tool.replay.branch.branch_values import Mean, turn_value

    name = str(loop.model) if request.endpoint is None else f"{loop.model} at {request.endpoint}"
    records = [branch.recorded(name, for_values=values) for branches in made for branch in branches]
    lines, path, page = add_branches(request.run, place, records), branches_path(request.run, place), Console()
    summary = f"{path}, {'line' if len(lines) == 1 else 'lines'} {lines[0]}" + (
        f" to {lines[-1]}" if len(lines) > 1 else ""
    )
    parent = made[0][0].point.trajectory
    if values:
        found = [turn_value(branches[0].point.turn, branches) for branches in made]
        turns = [branches[0].point.recorded_turn.text for branches in made]
        page.print(_table_of_values(turns, found, parent.reward), markup=False)
        summary += f"; values in {write_values(request.run, place, found, name)}"
    else:
        page.print(_table_of_branches(made[0], lines), markup=False)
        summary += f"; mean score {Mean.of([float(r.reward) for r in records if r.reward is not None])}"
    page.print(
        f"{summary}; {place} itself: {'no score' if parent.reward is None else f'{parent.reward:.3f}'}",
        soft_wrap=True,
    )
    accepted = sum(len(branch.drifts) for branches in made for branch in branches[:1])
    if accepted:
        page.print(
            f"{accepted} calls were answered otherwise than then (--accept_drift); extra.branch.drift tells them"
        )


def _table_of_values(turns: Sequence[str], values: Sequence[TurnValue], reward: float | None) -> Table:
    table = Table("before turn", "score", "success", "", "samples", "without a score", "what the model wrote in it")
    for text, value in zip(turns, values, strict=True):
        bar = "█" * round(10 * min(1.0, max(0.0, value.success.value or 0.0)))
        counts = (str(value.samples), str(value.unscored))
        table.add_row(str(value.turn), str(value.score), str(value.success), bar, *counts, _format(text))
    table.add_row("its end", "–" if reward is None else f"{reward:.3f}")
    return table


def _table_of_branches(branches: Sequence[Branch], lines: Sequence[int]) -> Table:
    table = Table("line", "score", "right", "stopped by", "turns", "state", "its answer ends in")
    for line, branch in zip(lines, branches, strict=True):
        made = branch.trajectory
        score = "–" if made.reward is None else f"{made.reward:.3f}"
        right = "–" if branch.correct is None else "yes" if branch.correct else "no"
        state = "a fork" if branch.forked else "calls run again" if branch.point.calls else "new"
        table.add_row(str(line), score, right, made.stop.value, str(made.num_turns), state, _format(made.model_text))
    return table


def _format(text: str) -> str:
    return repr(text[-MAX_DISPLAY_CHARACTERS:])[1:-1]
