"""Run many trajectories concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.prompt.opened_prompt import OpenPrompt
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.verification import AnyVerification

Result = TypeVar("Result")


@dataclass(frozen=True)
class RolloutStart:
    """Arguments of `Episode.run` for one trajectory of a rollout."""

    prompt_ids: Sequence[int]
    trajectory_id: str | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    use_tool: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    verification: AnyVerification | None = None
    task_prompt: Callable[[str], Sequence[int]] | None = None
    open_prompt: OpenPrompt | None = None


async def rollout(episode: Episode, starts: Sequence[RolloutStart], title: str = "rollout") -> list[Trajectory]:
    """Run all trajectories, at most `max_concurrent_trajectories` at a time. Returns them in the order of `starts`.

    Trajectories do not wait for each other. `enable_tqdm` shows a progress bar. If one raises, the others are cancelled
    and the exception is raised. A fault does not raise: it ends its trajectory only.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not episode.options.enable_tqdm) as progress:
        bar = progress.add_task(title, total=len(starts))

        async def one(start: RolloutStart) -> Trajectory:
            trajectory = await episode.run(
                start.prompt_ids,
                sampling_params=start.sampling_params,
                trajectory_id=start.trajectory_id,
                use_tool=start.use_tool,
                extra=start.extra,
                verification=start.verification,
                task_prompt=start.task_prompt,
                open_prompt=start.open_prompt,
            )
            progress.advance(bar)
            return trajectory

        return await all_or_none([asyncio.ensure_future(one(start)) for start in starts])


async def all_or_none(tasks: Sequence[asyncio.Future[Result]]) -> list[Result]:
    """Gather all results. If a task raises, or the caller is cancelled, cancel the other tasks and wait for them."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
