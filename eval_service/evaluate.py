"""``python -m eval_service.evaluate``: a data set through an endpoint, with scores and figures.

    python -m eval_service.evaluate --data test.parquet --reward_manager torl --base_url http://127.0.0.1:8000/v1

Writes into ``--out``: records.jsonl (one line an answer), evaluation.json (what answered, and how it was asked),
summary.json and report.md; the images that rows hold and tools show into images/, where records and report name them.
Broken off, the same command goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval_service.evaluation.agent_asking import AgentAsker
from eval_service.evaluation.asking import Asker, Asking
from eval_service.evaluation.dataset import Problem, read_problems
from eval_service.evaluation.image_report import IMAGES, with_images
from eval_service.evaluation.record import ABOUT, Key, Record, read_records, write_records
from eval_service.evaluation.report import Summary, as_markdown, summarise
from eval_service.model.checkpoint import Checkpoint, newest_checkpoint
from verl_tool.agent_loop.trajectory import save_images
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.gateway.presets import PRESETS
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.util.atomic_files import atomic_write
from verl_tool.util.command_line import run_command
from verl_tool.util.json_options import json_object

console = Console(stderr=True)


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and where the results go."""

    problems: tuple[Problem, ...]
    asking: Asking
    folder: Path
    ks: tuple[int, ...]
    title: str
    checkpoint: str | None = None
    """The newest of ``--from_run``, in words."""
    reward: str | None = None
    agent: GatewaySettings | None = None
    """The program that asks; None: the questions are sent as chats."""

    @property
    def records_path(self) -> Path:
        return self.folder / "records.jsonl"


async def answers(evaluation: Evaluation) -> list[Record]:
    """All answers: those of an earlier, broken run, and the missing ones, which are asked for now."""
    asking, agent = evaluation.asking, evaluation.agent
    async with Asker(asking) if agent is None else AgentAsker(asking, agent) as asker:
        known = known_records(evaluation, asker)
        _describe_model(evaluation, asker)
        samples = asking.samples
        missing = [(p, j) for p in evaluation.problems for j in range(samples) if (p.index, j) not in known]
        if known:
            console.print(
                f"{len(known)} answers are known already from {evaluation.records_path}; {len(missing)} are missing"
            )
        write_records(evaluation.records_path, known.values())
        await _ask_for(missing, known, asker, evaluation.records_path)
    return [known[key] for key in sorted(known)]


def _describe_model(evaluation: Evaluation, asker: Asker) -> None:
    """Say which weights answer, warn if they are not those of the run, and leave both in the folder."""
    served = "weights that the endpoint does not name" if asker.checkpoint is None else asker.checkpoint
    console.print(f"{evaluation.asking.base_url} serves {asker.model}: {served}", highlight=False, soft_wrap=True)
    if evaluation.checkpoint is not None and asker.checkpoint not in (None, evaluation.checkpoint):
        console.print(
            f"[bold yellow]the newest checkpoint of --from_run is {escape(evaluation.checkpoint)}, and the endpoint "
            f"serves {escape(str(asker.checkpoint))}[/bold yellow]",
            highlight=False,
            soft_wrap=True,
        )
    evaluation.folder.mkdir(parents=True, exist_ok=True)
    about = {"data": evaluation.title, "reward": evaluation.reward, **asker.describe()}
    with atomic_write(evaluation.folder / ABOUT) as draft:
        draft.write_text(json.dumps(about, indent=2) + "\n")


async def _ask_for(wanted: Sequence[tuple[Problem, int]], known: dict[Key, Record], asker: Asker, path: Path) -> None:
    """Ask for what is `wanted`; each answer goes into `known` and, as a line, into the file at `path`."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with path.open("a", encoding="utf-8") as file, Progress(*columns, console=console) as progress:
        bar = progress.add_task("answers", total=len(known) + len(wanted), completed=len(known))

        def keep(record: Record) -> None:
            if record.trajectory is not None:
                save_images(path.parent / IMAGES, record.trajectory.images.values())
            known[record.key] = record
            file.write(record.to_json() + "\n")
            file.flush()
            progress.advance(bar)

        await asker.ask_all(wanted, keep)


def known_records(evaluation: Evaluation, asker: Asker) -> dict[Key, Record]:
    """The answers of an earlier run of the same evaluation. Those that failed are left out: they are asked for again.
    Raises ConfigError if there are answers of another evaluation, which would be lost."""
    digests = {problem.index: asker.digest(problem) for problem in evaluation.problems}
    answered = [record for record in read_records(evaluation.records_path) if record.error is None]
    records = {r.key: r for r in answered if r.index in digests and r.sample < evaluation.asking.samples}
    if len(records) < len(answered) or any(digests[r.index] != r.digest for r in records.values()):
        raise ConfigError(
            f"{evaluation.records_path} holds answers of another evaluation (model, loop, problems, sampling, or more "
            "of them); give another --out, or move the file away"
        )
    return records


async def evaluate(evaluation: Evaluation, reward: DictConfig, tokenizer: Any) -> Summary:
    """Ask, score, and write everything down. Raises ConfigError."""
    # verl takes seconds to import; a command line that is wrong shall not wait for it.
    from eval_service.evaluation.scoring import Scorer

    scorer = Scorer(reward, tokenizer)
    evaluation.folder.mkdir(parents=True, exist_ok=True)
    records = await scorer.score_all(await answers(evaluation), evaluation.problems)
    write_records(evaluation.records_path, records)
    summary = summarise(records, len(evaluation.problems), evaluation.asking.samples, evaluation.ks)
    (evaluation.folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    page = as_markdown(summary, evaluation.title) + with_images(records, evaluation.folder)
    (evaluation.folder / "report.md").write_text(page)
    return summary


def command(
    data: Annotated[Path, typer.Option("--data", help="A .parquet or .jsonl file of verl's rows.")],
    base_url: Annotated[str, typer.Option("--base_url", help="The endpoint, with /v1.")] = "http://127.0.0.1:8000/v1",
    reward_manager: Annotated[
        str | None, typer.Option("--reward_manager", help="Name of the reward manager, such as torl.")
    ] = None,
    reward_options: Annotated[
        str, typer.Option("--reward_kwargs", help="Its options, as JSON; in training reward.reward_kwargs.")
    ] = "{}",
    from_run: Annotated[
        Path | None,
        typer.Option("--from_run", help="Folder of a training run: its reward, that one's options, its tokenizer."),
    ] = None,
    tool_server_url: Annotated[
        str | None,
        typer.Option("--tool_server_url", help="Where a reward runs code. The server that a run started is gone."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Scores then leave special tokens out, as training does. Default: the run's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Default: the only one that the endpoint serves.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers of each problem.")] = 1,
    k: Annotated[str, typer.Option("--k", help="For pass@k: numbers with commas between.")] = "1",
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0)] = None,
    top_p: Annotated[float | None, typer.Option("--top_p", min=0.0, max=1.0)] = None,
    max_tokens: Annotated[int | None, typer.Option("--max_tokens", min=1)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Sample j draws with seed + j.")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Answers asked for at a time.")] = 64,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many problems.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Default: outputs/evaluation/<data's name>.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for one answer.")] = 3600.0,
    api_key: Annotated[
        str, typer.Option("--api_key", envvar="OPENAI_API_KEY", show_envvar=True, help="The endpoint's bearer token.")
    ] = "none",
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Run this agent for each row: a preset, such as pi, or a command with {task}."),
    ] = None,
    gateway_options: Annotated[
        str,
        typer.Option("--gateway", help="JSON of its settings, as the group gateway of a training. Default: the run's."),
    ] = "{}",
) -> None:
    """Run a data set through an endpoint and score the answers. Exit code 1 if some have none."""
    try:
        folder = out or Path("outputs/evaluation") / data.stem
        asking = Asking(base_url, api_key, model, n, temperature, top_p, max_tokens, seed, concurrency, timeout)
        evaluation = Evaluation(tuple(read_problems(data, limit)), asking, folder, _numbers(k, n), data.stem)
        reward = _reward(reward_manager, reward_options, from_run, tool_server_url)
        evaluation = replace(evaluation, reward=str(reward.reward.reward_manager.name))
        # Of the run, the reward alone is used where the tokenizer is named.
        run = from_run if tokenizer is None else None
        checkpoint = _checkpoint(run) if run is not None else None
        if checkpoint is not None:
            evaluation = replace(evaluation, checkpoint=str(checkpoint))
            console.print(f"{from_run}: {checkpoint}", highlight=False, soft_wrap=True)
        name = tokenizer if checkpoint is None else str(checkpoint.model)
        evaluation = replace(evaluation, agent=_agent(agent, gateway_options, run))
        if evaluation.agent is not None and name is None:
            raise ConfigError("answers of agents are graded by their tokens; give --tokenizer, or --from_run")
        summary = asyncio.run(evaluate(evaluation, reward, _tokenizer(name)))
    except VerlToolError as error:
        console.print(f"[bold red]cannot evaluate:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        console.print("broken off; the same command goes on where it stopped")
        raise typer.Exit(130) from None
    Console().print(Markdown(as_markdown(summary, evaluation.title)))
    if summary.errors or summary.unscored:
        console.print(
            f"[bold yellow]{summary.errors} answers did not come, {summary.unscored} have no score[/bold yellow]"
        )
        raise typer.Exit(1)


def _numbers(text: str, samples: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdigit() or not 1 <= int(part) <= samples]
    if wrong:
        raise ConfigError(f"--k {wrong[0]} with --n {samples}; give numbers from 1 to the number of answers a problem")
    return tuple(sorted({int(part) for part in parts}))


def _reward(name: str | None, options: str, run: Path | None, tool_server_url: str | None = None) -> DictConfig:
    """The reward of the command line; what it leaves open is the run's. Raises ConfigError."""
    if name is None and run is None:
        raise ConfigError("no reward: give --reward_manager (such as torl), or --from_run")
    chosen = json_object(options, f"--reward_kwargs {options!r}")
    # What follows imports verl.
    from eval_service.evaluation.scoring import reward_config, reward_of_run

    if run is None:
        return reward_config(str(name), chosen, tool_server_url)
    from eval_service.model.run_config import run_config

    return reward_of_run(run_config(run), name, chosen, tool_server_url)


def _agent(agent: str | None, options: str, run: Path | None) -> GatewaySettings | None:
    """The program that asks; what the command line leaves open is the run's. Raises ConfigError."""
    chosen: list[Any] = [json_object(options, f"--gateway {options!r}")]
    if agent is not None:
        preset = agent if agent in PRESETS else None
        chosen.insert(
            0, {"program": {"preset": preset, "command": [] if preset else shlex.split(agent), "python": None}}
        )
    context: int | None = None
    if run is not None:
        from eval_service.model.run_config import run_config
        from verl_tool.agent_loop.verl.config import context_tokens

        config = run_config(run)
        context = context_tokens(config.actor_rollout_ref.rollout)
        chosen.insert(0, OmegaConf.to_container(config.get("gateway") or OmegaConf.create({}), resolve=True))
    merged = OmegaConf.create({"gateway": OmegaConf.merge(*chosen)})
    if GatewaySettings.is_set(merged):
        # A command may hold what looks like an interpolation.
        settings = GatewaySettings.parse(OmegaConf.to_container(merged.gateway, resolve=False))
        return settings if context is None else settings.in_context(context)
    if chosen[-1]:
        raise ConfigError("--gateway has settings of an agent, and there is none; give --agent")
    return None


def _checkpoint(run: Path) -> Checkpoint:
    try:
        return newest_checkpoint(run)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. To grade answers of another model by this run's reward, name its tokenizer: --tokenizer"
        ) from None


def _tokenizer(name: str | None) -> Any:
    """transformers' tokenizer, as the reward managers of training have it; None: texts are scored."""
    if name is None:
        return None
    from eval_service.model.tokenizer import load_tokenizer

    return load_tokenizer(name).tokenizer


if __name__ == "__main__":
    run_command(command)
