"""``python -m verl_tool.replay.branch``: continue a stored trajectory from a turn, unchanged or edited.

    python -m verl_tool.replay.branch outputs/calculator/grpo step_2.jsonl:17 --turn 2
    python -m verl_tool.replay.branch outputs/calculator/grpo step_2.jsonl:17 --turn 2 --action '1+1<call>' --samples 8
    python -m verl_tool.replay.branch outputs/calculator/grpo step_2.jsonl:17 --values

Exit code 0: the branches are stored; 1: the tools answer differently; 2: the trajectory cannot be continued.
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
    from verl_tool.replay.branch.branch_point import BranchPoint, Edit, RecordLocation
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
    """The training whose loop, tools and reward are used: `run`, or for an evaluation `from_run`."""
    samples: int
    tool_server_url: str | None
    endpoint: str | None
    accept_drift: bool


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, or of an evaluation (records.jsonl).")],
    trajectory: Annotated[str, typer.Argument(metavar="FILE:LINE", help="Such as step_3.jsonl:17, or branches/….")],
    turn: Annotated[int | None, typer.Option("--turn", help="The turn to continue from, counted from 1.")] = None,
    action: Annotated[str | None, typer.Option("--action", help="Replaces the model's text in that turn.")] = None,
    observation: Annotated[
        str | None, typer.Option("--observation", help="Replaces the answer to that turn's call.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Continue from every turn, and estimate its value.")] = False,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, max=1024, help="Continuations per turn. Default: 1; with --values 8."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of the model. Default: the run's newest weights.")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Server of the model, as vllm serve; its tokenizer is in --model."),
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, help="Replaces the run's.")] = None,
    tool_server_url: Annotated[
        str | None, typer.Option("--tool_server_url", help="Server for the calls. Default: start the run's.")
    ] = None,
    accept_drift: Annotated[
        bool, typer.Option("--accept_drift", help="Continue although the tools answer differently.")
    ] = False,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Files of rows, instead of those in the run's config.")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from_run", help="Evaluation only: the training whose reward and tools it used."),
    ] = None,
) -> None:
    """Continue a stored trajectory from a turn."""
    try:
        _check_options(turn, action, observation, values)
        # These imports are slow.
        from verl_tool.replay.branch.branch_point import RecordLocation, make_branch_point
        from verl_tool.replay.branch.rebuilt_state import DriftError
        from verl_tool.replay.branch.run_loop import load_run_loop
        from verl_tool.replay.reexecute import tabulate_drifts
        from verl_tool.replay.stored import StoredRun

        location, stored_run = RecordLocation.parse(trajectory), StoredRun(run, tuple(data or ()))
        stored = stored_run.find(location.file, location.line)
        trained = run if stored_run.config is not None else from_run
        if trained is None:
            raise ConfigError(f"{run} does not name the training of its model; give --from_run")
        first = make_branch_point(location, stored, 1 if turn is None else turn, _make_edit(action, observation))
        turns = range(1, first.trajectory.num_turns + 1) if values else [first.turn]
        points = [make_branch_point(location, stored, each, first.edit) for each in turns]
        if not os.access(run, os.W_OK):
            raise ConfigError(f"branches are stored in {run}, which is not writable; copy the run")
        count = samples or (SAMPLES_FOR_VALUES if values else 1)
        loop = load_run_loop(trained, model, validation=stored.is_validation, temperature=temperature)
        console.print(f"model: {loop.model}", highlight=False, soft_wrap=True)
        loop.check_tokens(first.trajectory)
        if count > 1 and loop.sampling.temperature == 0:
            raise ConfigError(
                f"the run sampled with temperature 0, so {count} continuations would be equal; give --temperature"
            )
        request = BranchRequest(run, trained, count, tool_server_url, endpoint, accept_drift)
        try:
            _report(request, location, loop, _make_branches(request, loop, points), values=values)
        except DriftError as error:
            console.print(f"[bold red]the tools answer differently:[/bold red] {escape(str(error))}", highlight=False)
            Console().print(tabulate_drifts(error.drifts, per_tool=5), markup=False)
            raise typer.Exit(1) from None
    except VerlToolError as error:
        console.print(f"[bold red]cannot continue:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def _check_options(turn: int | None, action: str | None, observation: str | None, values: bool) -> None:
    if values and (turn, action, observation) != (None, None, None):
        raise ConfigError("--values continues from every turn unchanged; leave out --turn, --action and --observation")
    if not values and turn is None:
        raise ConfigError("no turn; give --turn K, counted from 1, or --values for every turn")
    if action is not None and observation is not None:
        raise ConfigError("a branch has one edit; give --action or --observation, not both")


def _make_edit(action: str | None, observation: str | None) -> Edit | None:
    from verl_tool.replay.branch.branch_point import Edit

    if action is not None:
        return Edit("action", action)
    return None if observation is None else Edit("observation", observation)


def _make_branches(request: BranchRequest, loop: RunLoop, points: Sequence[BranchPoint]) -> list[list[Branch]]:
    """Make the branches of each point, on a tool server that is stopped at the end if it was started here."""
    from eval_service.evaluation.scoring import Scorer
    from eval_service.model.run_config import run_config
    from verl_tool.replay.regrade import load_reward_config, load_scoring_tokenizer
    from verl_tool.replay.server import served_tools, tool_server

    config, row = run_config(request.trained), points[0].row
    with ExitStack() as stack:
        url = request.tool_server_url
        if loop.options.enable_agent and row.use_tool and row.tools != ():
            with console.status("starting the tool server" if url is None else "connecting to the tool server"):
                url = stack.enter_context(tool_server(config, url))
        elif url is not None:
            raise ConfigError("this trajectory uses no tools; leave out --tool_server_url")
        started = url if request.tool_server_url or config.tool_server.start is not None else None
        reward = load_reward_config(request.trained, None, {}, started, trained=True)
        scorer = Scorer(reward, load_scoring_tokenizer(request.trained))
        return asyncio.run(_continue_points(request, loop, points, url, served_tools(config), scorer))


async def _continue_points(
    request: BranchRequest, loop: RunLoop, points: Sequence[BranchPoint], url: str | None, tools: list[str], scorer: Any
) -> list[list[Branch]]:
    from verl_tool.client import ToolClient
    from verl_tool.replay.branch.branches import Brancher
    from verl_tool.replay.branch.continuation import Continuation
    from verl_tool.replay.branch.model import open_model
    from verl_tool.replay.branch.rebuilt_state import StateRebuilder
    from verl_tool.replay.reexecute import ObservationComparison

    async with AsyncExitStack() as stack:
        with console.status("loading the model"):
            model = await stack.enter_async_context(open_model(loop, request.endpoint))
        client, rebuilder = None, None
        if url is not None:
            settings: dict[str, Any] = dict(loop.options.client_settings())
            key = os.environ.get("VERL_TOOL_API_KEY")
            client = await stack.enter_async_context(ToolClient(url, api_key=key, **settings))
            known = tools or [tool.name for tool in await client.tools()]
            rebuilder = StateRebuilder(client, ObservationComparison(known), loop.options, request.accept_drift)
        brancher = Brancher(Continuation(loop, model, client), scorer, rebuilder)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        bar = progress.add_task("continuing", total=request.samples * len(points))
        return [await brancher.run(point, request.samples, lambda: progress.advance(bar)) for point in points]


def _report(
    request: BranchRequest, location: RecordLocation, loop: RunLoop, made: list[list[Branch]], *, values: bool
) -> None:
    """Store the branches, and print a summary."""
    from verl_tool.replay.branch.branch_files import add_branches, branches_path, write_values
    from verl_tool.replay.branch.branch_values import Mean, estimate_turn_value

    name = str(loop.model) if request.endpoint is None else f"{loop.model} at {request.endpoint}"
    records = [branch.to_record(name, for_values=values) for branches in made for branch in branches]
    lines, path, page = add_branches(request.run, location, records), branches_path(request.run, location), Console()
    summary = f"{path}, {'line' if len(lines) == 1 else 'lines'} {lines[0]}" + (
        f" to {lines[-1]}" if len(lines) > 1 else ""
    )
    parent = made[0][0].point.trajectory
    if values:
        estimates = [estimate_turn_value(branches[0].point.turn, branches) for branches in made]
        turns = [branches[0].point.recorded_turn.text for branches in made]
        page.print(_tabulate_values(turns, estimates, parent.reward), markup=False)
        summary += f"; values in {write_values(request.run, location, estimates, name)}"
    else:
        page.print(_tabulate_branches(made[0], lines), markup=False)
        summary += f"; mean score {Mean.of([float(r.reward) for r in records if r.reward is not None])}"
    page.print(
        f"{summary}; {location} itself: {'no score' if parent.reward is None else f'{parent.reward:.3f}'}",
        soft_wrap=True,
    )
    accepted = sum(len(branch.drifts) for branches in made for branch in branches[:1])
    if accepted:
        page.print(f"{accepted} calls were answered differently (--accept_drift); see extra.branch.drift")


def _tabulate_values(turns: Sequence[str], values: Sequence[TurnValue], reward: float | None) -> Table:
    table = Table("before turn", "score", "success", "", "samples", "without a score", "text of the turn")
    for text, value in zip(turns, values, strict=True):
        bar = "█" * round(10 * min(1.0, max(0.0, value.success.value or 0.0)))
        counts = (str(value.samples), str(value.unscored))
        table.add_row(str(value.turn), str(value.score), str(value.success), bar, *counts, _excerpt(text))
    table.add_row("end", "–" if reward is None else f"{reward:.3f}")
    return table


def _tabulate_branches(branches: Sequence[Branch], lines: Sequence[int]) -> Table:
    table = Table("line", "score", "correct", "stopped by", "turns", "state", "end of its answer")
    for line, branch in zip(lines, branches, strict=True):
        made = branch.trajectory
        score = "–" if made.reward is None else f"{made.reward:.3f}"
        correct = "–" if branch.correct is None else "yes" if branch.correct else "no"
        state = "forked" if branch.forked else "rebuilt" if branch.point.calls else "new"
        table.add_row(str(line), score, correct, made.stop.value, str(made.num_turns), state, _excerpt(made.model_text))
    return table


def _excerpt(text: str) -> str:
    return repr(text[-MAX_DISPLAY_CHARACTERS:])[1:-1]
