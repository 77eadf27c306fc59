"""Episodes of other systems on our tools. Each is one trajectory of the tool server.

An adapter process stands in front of a tool server and calls it through `ToolClient`, as the loop does: replicas,
limits, time to live and metrics are the server's, and each step is numbered, so that a repeated request runs once. What
an adapter keeps of an episode is its id, its step number and its row.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.client import ToolClient
from verl_tool.content.parts import to_wire
from verl_tool.environments.served.row_grader import RowGrade, RowGrader
from verl_tool.environments.served.task_rows import TaskRow, TaskRows
from verl_tool.errors import ConfigError, StartError, ToolFault, VerlToolError
from verl_tool.protocol import (
    ABORT_FIELD,
    DIRECT_FIELD,
    KEEP_FIELD,
    MAX_ACTION_CHARACTERS,
    SENT_ONCE,
    VERIFY_FIELD,
    FaultKind,
    StepResult,
    ToolDescription,
)
from verl_tool.util.json_text import encode_json, excerpt
from verl_tool.verification import MARGIN_SECONDS, Verdict, Verification

GRACE_SECONDS = 5.0
"""Beyond `EpisodeLimits.call_seconds`, so that the client can report the deadline itself."""
MAX_WAITING = 16
"""Calls of one episode at a time; they run one after the other."""
START_SECONDS = 30.0
"""For the tool server's first answer."""
GRADER_FAILED = "the grader failed"
AUDIO_LEFT_OUT = "[audio was left out: it cannot be sent here]"
_SWEEP_SECONDS = 5.0
_KNOWN_SECONDS = 60.0
"""How long the list of tools is kept."""


class EpisodeLimits(BaseModel):
    """Bounds of one adapter process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_episodes: int = Field(default=1024, ge=1)
    idle_seconds: float = Field(default=3600.0, gt=0)
    """An episode that no request used for so long is closed."""
    call_seconds: float = Field(default=300.0, gt=0)
    """Deadline of one call, with all retries."""
    max_calls: int = Field(default=1000, ge=1)
    """Of one episode."""


logger = logging.getLogger(__name__)


class CapacityError(VerlToolError):
    """There are as many episodes as there may be."""


class EpisodeError(VerlToolError):
    """The request does not fit the episode, which goes on unchanged."""


class EpisodeLostError(VerlToolError):
    """The episode is not known here any more, or what failed in it was not the policy's doing. It cannot go on."""


@dataclass(frozen=True)
class CallOutcome:
    """The answer to one call."""

    text: str
    is_error: bool = False
    error: str = ""
    """Why the tool gave no answer, by what the policy did: ``tool_not_found``, ``timeout``, ``execution_error``."""
    reward: float | None = None
    """The tool's, for this call."""
    done: bool = False
    """The episode takes no further call."""
    images: tuple[str, ...] = ()
    """Data URIs."""


class ServedEpisode:
    """One episode. Its calls run one after the other, and each to its end, even if nobody waits for the answer."""

    def __init__(self, episodes: ServedEpisodes, row: TaskRow | None) -> None:
        self.id = secrets.token_hex(16)
        self.row = row
        self.used_at = time.monotonic()
        self.steps = 0
        """Calls that were sent."""
        self.is_over = False
        """Whether a call ended it."""
        self._episodes = episodes
        self._lost: str | None = None
        self._failed_call = False
        self._grade: RowGrade | None = None
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._extra = dict(row.call_extra) if row else {}

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    async def tools(self) -> list[ToolDescription]:
        """The tools that it may use. Raises EpisodeLostError if the server does not answer."""
        listed = None if self.row is None else self.row.listed
        described = await self._episodes.tools()
        return [tool for tool in described if listed is None or tool.name in listed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallOutcome:
        """Run a tool. Raises EpisodeError if it cannot be sent, EpisodeLostError if the infrastructure failed."""
        known = [tool.name for tool in await self.tools()]
        if name not in known:
            return CallOutcome(
                f"tool {excerpt(name)} is unknown; known: {', '.join(known)}", is_error=True, error="tool_not_found"
            )
        action = encode_json({"name": name, "arguments": arguments}).decode()
        if len(action) > MAX_ACTION_CHARACTERS:
            raise EpisodeError(f"the call has {len(action)} characters; at most {MAX_ACTION_CHARACTERS} are taken")
        return await self._run_to_end(self._call(name, action))

    async def grade(self, turns: Sequence[str]) -> RowGrade:
        """End the episode, and grade it by its row. Repeated, it gives the same grade.

        Args:
            turns: what the policy wrote in addition to its calls; the last one is its answer.

        Raises EpisodeError without a row, EpisodeLostError if the infrastructure failed.
        """
        if self.row is None:
            raise EpisodeError("this episode has no row to grade it by; serve rows (--rows)")
        return await self._run_to_end(self._make_grade(self.row, turns))

    async def close(self, why: str = "the episode was closed") -> None:
        """Free the state of the tools, and stop what they run for it. `why` is told whoever calls it later."""
        self._lost = self._lost or why
        self._episodes.forget(self)
        for task in self._running:
            task.cancel()
        if self.steps:
            await self._episodes.release(self.id)

    # The episode's tasks, one at a time

    async def _run_to_end(self, work: Any) -> Any:
        if len(self._running) >= MAX_WAITING:
            work.close()
            raise EpisodeError(f"{MAX_WAITING} calls of this episode are running; wait for their answers")
        self.used_at = time.monotonic()
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._lost is not None and task.cancelled():
                raise EpisodeLostError(self._lost) from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.used_at = time.monotonic()
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it has it

    async def _call(self, name: str, action: str) -> CallOutcome:
        async with self._lock:
            if self.is_over:
                return CallOutcome("Error: the episode has ended; no tool can be called any more", is_error=True)
            if self.steps >= self._episodes.limits.max_calls:
                words = f"Error: at most {self._episodes.limits.max_calls} calls can be made"
                return CallOutcome(words, is_error=True)
            result = await self._send(action, {DIRECT_FIELD: True, **({KEEP_FIELD: True} if self.row else {})})
            if (fault := result.fault) is not None:
                # Nobody knows what of the call still runs, so that nothing can follow it.
                self.is_over = self._failed_call = True
                kind = "timeout" if fault.kind is FaultKind.TIMEOUT else "execution_error"
                return CallOutcome(f"Error: {fault.message}", is_error=True, error=kind, done=True)
            self.is_over = result.done
            is_error = not result.valid or bool((result.metrics or {}).get("error"))
            # What a policy can have a tool answer must not end its session.
            text = "\n".join([result.observation, *[AUDIO_LEFT_OUT] * bool(result.audio)])
            return CallOutcome(text, is_error=is_error, reward=result.reward, done=result.done, images=_images(result))

    async def _make_grade(self, row: TaskRow, turns: Sequence[str]) -> RowGrade:
        async with self._lock:
            if self._grade is None:
                self._reject_lost()
                if row.verification is None:
                    grade = await self._episodes.grader.grade(row, turns)
                else:
                    grade = await self._verify(row.verification)
                if grade.reward is None:
                    # It may quote the ground truth, which no client gets.
                    logger.warning("row %d has no reward: %s", row.index, grade.failure)
                    grade = replace(grade, failure=f"{GRADER_FAILED} for row {row.index}; this server's log says why")
                self.is_over, self._grade = True, grade
            return self._grade

    async def _verify(self, verification: Verification) -> RowGrade:
        if self._failed_call:  # as the reward manager `terminal` has it
            return RowGrade(0.0, numbers={"acc": 0.0, "verified": 0.0})
        result = await self._send("", {VERIFY_FIELD: verification.model_dump(mode="json")}, is_last=True)
        verdict = Verdict(result.reward, result.observation, dict(result.metrics or {}), result.fault)
        if verdict.score is None:
            raise self._lose(f"the verifier was not run: {result.fault and result.fault.message}")
        numbers = {**verdict.numbers, "acc": float(verdict.score >= 1.0), "verified": float(verdict.counts)}
        return RowGrade(verdict.score, numbers=numbers)

    async def _send(self, action: str, extra: Mapping[str, Any], *, is_last: bool = False) -> StepResult:
        """Send the next step. Raises EpisodeLostError for what no policy can cause."""
        self._reject_lost()
        once = {name: self._extra.pop(name) for name in SENT_ONCE if name in self._extra}
        step, self.steps = self.steps, self.steps + 1
        result = await self._episodes.send(self.id, action, step, {**self._extra, **once, **extra}, is_last)
        if result.fault is not None and not result.fault.kind.provokable:
            raise self._lose(f"{result.fault.kind.value}: {result.fault.message}")
        return result

    def _lose(self, why: str) -> EpisodeLostError:
        self._lost = why
        return EpisodeLostError(why)

    def _reject_lost(self) -> None:
        if self._lost is not None:
            raise EpisodeLostError(self._lost)


def _images(result: StepResult) -> tuple[str, ...]:
    """Data URIs of the images of an answer."""
    images = result.image if isinstance(result.image, list | tuple) else [result.image] if result.image else []
    return tuple(image if isinstance(image, str) else to_wire(image) for image in images)


class ServedEpisodes:
    """The episodes of one adapter process. Use it in one event loop; `start` and `close` it."""

    def __init__(
        self,
        client: ToolClient,
        limits: EpisodeLimits | None = None,
        rows: TaskRows | None = None,
        grader: RowGrader | None = None,
    ) -> None:
        """The client's deadline is `EpisodeLimits.call_seconds`."""
        self.client, self.limits, self.rows = client, limits or EpisodeLimits(), rows
        self.grader = grader or RowGrader()
        self.name = secrets.token_hex(8)
        """Of this process, from its start to its end."""
        self._episodes: dict[str, ServedEpisode] = {}
        self._described: list[ToolDescription] = []
        self._described_at = -_KNOWN_SECONDS
        self._sweeper: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._episodes)

    async def start(self) -> None:
        """Ask the tool server for its tools, and make the grader. Raises ConfigError for rows that cannot be served,
        StartError if the server does not answer."""
        try:
            self._described = await asyncio.wait_for(self._ask_for_tools(), START_SECONDS)
        except (asyncio.TimeoutError, ToolFault) as error:
            words = str(error) or f"no answer within {START_SECONDS:g} s"
            raise StartError(
                f"the tool server at {self.client.url} does not answer ({words}); start it first"
            ) from None
        self._described_at = time.monotonic()
        if self.rows is not None:
            self._check_rows(self.rows, {tool.name for tool in self._described})
            await self.grader.start(self.rows)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Close all episodes and the grader; the client is the caller's."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for episode in list(self._episodes.values()):
            await episode.close()
        if self._releases:
            await asyncio.wait(self._releases, timeout=GRACE_SECONDS)
        await self.grader.close()

    def open(self, index: int | None = None) -> ServedEpisode:
        """Open an episode of row `index`; None: any row, or none if no rows are served.

        Raises CapacityError if there are too many, EpisodeError for a row that is not there.
        """
        if len(self._episodes) >= self.limits.max_episodes:
            raise CapacityError(
                f"{len(self._episodes)} of {self.limits.max_episodes} episodes are open; close some, or raise "
                "--max_episodes"
            )
        episode = ServedEpisode(self, self.row(index))
        self._episodes[episode.id] = episode
        return episode

    def row(self, index: int | None) -> TaskRow | None:
        """Row `index`; None: any. Raises EpisodeError if it is not there."""
        if self.rows is None:
            if index is not None:
                raise EpisodeError("no rows are served here; start the server with --rows")
            return None
        if index is None:
            index = secrets.randbelow(len(self.rows))
        if not 0 <= index < len(self.rows):
            raise EpisodeError(f"row {index} is not there; rows 0 to {len(self.rows) - 1} are served")
        return self.rows.rows[index]

    def find(self, episode_id: str) -> ServedEpisode | None:
        """An open episode."""
        return self._episodes.get(episode_id)

    def forget(self, episode: ServedEpisode) -> None:
        """Give its place to another one."""
        self._episodes.pop(episode.id, None)

    async def tools(self) -> list[ToolDescription]:
        """The tools of the server. Raises EpisodeLostError if it does not answer."""
        if time.monotonic() - self._described_at >= _KNOWN_SECONDS:
            try:
                self._described = await self._ask_for_tools()
            except ToolFault as error:
                raise EpisodeLostError(str(error)) from error
            self._described_at = time.monotonic()
        return self._described

    async def _ask_for_tools(self) -> list[ToolDescription]:
        """The tools that a policy calls. Raises ToolFault."""
        return [tool for tool in await self.client.tools() if not tool.environment]

    async def send(
        self, episode_id: str, action: str, step: int, extra: Mapping[str, Any], is_last: bool
    ) -> StepResult:
        """Send a step to the tool server. Raises EpisodeLostError if it cannot be sent."""
        try:
            return await asyncio.wait_for(
                self.client.call(episode_id, action, step=step, extra=extra, is_last_step=is_last),
                self.limits.call_seconds + GRACE_SECONDS,
            )
        except asyncio.TimeoutError:
            raise EpisodeLostError(f"the tool server did not answer within {self.limits.call_seconds:g} s") from None
        except (ToolFault, ConfigError) as error:
            raise EpisodeLostError(str(error)) from error

    async def release(self, episode_id: str) -> None:
        """Free a trajectory's state, even if the caller is cancelled. If that fails, the server evicts it later."""
        task = asyncio.ensure_future(self._release(episode_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.shield(task)

    async def _release(self, episode_id: str) -> None:
        try:
            await asyncio.wait_for(
                self.client.call(episode_id, "", finish=True, extra={ABORT_FIELD: True}), 2 * GRACE_SECONDS
            )
        except (asyncio.TimeoutError, ToolFault, ConfigError):
            return

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self.limits.idle_seconds / 4))
            before = time.monotonic() - self.limits.idle_seconds
            for episode in [each for each in self._episodes.values() if each.used_at < before and not each.is_busy]:
                await episode.close(f"the episode was idle for {self.limits.idle_seconds:g} s and was closed")

    def _check_rows(self, rows: TaskRows, known: set[str]) -> None:
        for row in rows.rows:
            if unknown := set(row.listed or ()) - known:
                raise ConfigError(
                    f"row {row.index} lists the tools {sorted(unknown)}, which the tool server does not serve; it has "
                    f"{sorted(known)}"
                )
            seconds = 0.0 if row.verification is None else row.verification.timeout_seconds + MARGIN_SECONDS
            if seconds > self.limits.call_seconds:
                raise ConfigError(
                    f"row {row.index} has a verifier that may take {seconds:g} s, and --call_seconds is "
                    f"{self.limits.call_seconds:g}; set it to {seconds:g} or more"
                )
