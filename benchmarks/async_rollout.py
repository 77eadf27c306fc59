"""How much faster a rollout is if no trajectory waits for another.

    python benchmarks/async_rollout.py --json outputs/benchmarks/async_rollout.json

The real `Episode` runs 2048 trajectories twice: each at its own pace (trajectory-level), and in lockstep (all
generate, then all call their tool, then all generate: batch-synchronous, as rollouts were before agent loops). Model
and tools are simulated, and so is time: an event loop whose clock jumps to the next event makes the figures exact and
the same on every machine. The loop's own CPU time is not in them; it is measured apart.

What is simulated (all random numbers from ``--seed``):

- a turn of the model: lognormal length, median 350 tokens, sigma 0.8, at most 3072;
- the engine: ``--gpus`` GPUs that take 1024 sequences each (verl's default); a decoding step takes
  8 ms + 20 us x (sequences on a GPU): fewer sequences run faster, which favours the lockstep's stragglers;
- a tool call: lognormal, median 0.5 s, sigma 1.0, at most 10 s; in the scenario "code" 2 % of calls run into that
  timeout, in "light" none but by chance. ``--tool-workers`` calls run at a time: code takes a core, so 128 cores;
- prompts cost nothing, and each trajectory makes all its tool turns: n turns are n + 1 generations and n calls.

The bound is what no scheduler can beat: the larger of the longest trajectory run all by itself, and all work spread
evenly over a full engine or over all tool workers.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import random
import selectors
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.rollout import RolloutStart, rollout
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.protocol import StepResult

STEP_BASE_SECONDS, STEP_SECONDS_A_SEQUENCE, SEQUENCES_A_GPU = 0.008, 0.00002, 1024
MEDIAN_TOKENS, SIGMA_TOKENS, MOST_TOKENS = 350, 0.8, 3072
MEDIAN_TOOL_SECONDS, SIGMA_TOOL, TOOL_TIMEOUT_SECONDS = 0.5, 1.0, 10.0
TIMEOUT_CHANCE = {"light": 0.0, "code": 0.02}
STOP = "#"


@dataclass(frozen=True)
class Work:
    """What one trajectory does, drawn beforehand so that both ways of running it do the same."""

    tokens: tuple[int, ...]
    """Length of each turn of the model."""
    tool_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """One comparison, in simulated seconds."""

    scenario: str
    turns: int
    tool_workers: int
    seed: int
    lockstep_seconds: float
    async_seconds: float
    bound_seconds: float
    cpu_ms_per_turn: float
    """The loop's own CPU time, in real milliseconds."""

    @property
    def speedup(self) -> float:
        return self.lockstep_seconds / self.async_seconds

    @property
    def bound_share(self) -> float:
        """How close the trajectory-level rollout is to the bound: 1 is perfect."""
        return self.bound_seconds / self.async_seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: what would be waited for is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self.now += timeout
            return super().select(0)
        return super().select(timeout)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time. It must wait for timers only, never for a socket or a thread."""

    def __init__(self) -> None:
        self._simulated = _JumpingSelector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now


class Engine:
    """Decodes up to `SEQUENCES_A_GPU` sequences a GPU at a time; all advance by one token a step."""

    def __init__(self, gpus: int) -> None:
        self._gpus, self._slots = gpus, gpus * SEQUENCES_A_GPU
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        self._steps = 0.0
        self._since = 0.0
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    async def decode(self, tokens: int) -> None:
        """Returns when `tokens` tokens were decoded."""
        done = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, done))
        self._advance()
        await done

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running:
            self._steps += (now - self._since) / step_seconds(len(self._running), self._gpus)
        self._since = now
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            heapq.heappop(self._running)[2].set_result(None)
        while self._queue and len(self._running) < self._slots:
            tokens, done = self._queue.popleft()
            self._serial += 1
            heapq.heappush(self._running, (self._steps + tokens, self._serial, done))
        self._wake_at_the_next_end()

    def _wake_at_the_next_end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left = self._running[0][0] - self._steps
            seconds = left * step_seconds(len(self._running), self._gpus)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._advance)


def step_seconds(sequences: int, gpus: int) -> float:
    """Time of one decoding step with `sequences` spread over `gpus`."""
    return STEP_BASE_SECONDS + STEP_SECONDS_A_SEQUENCE * math.ceil(sequences / gpus)


class Lockstep:
    """Lets `parties` go on only when all have arrived."""

    def __init__(self, parties: int) -> None:
        self._parties, self._arrived, self._gate = parties, 0, asyncio.Event()

    async def wait(self) -> None:
        self._arrived += 1
        gate = self._gate
        if self._arrived == self._parties:
            self._arrived, self._gate = 0, asyncio.Event()
            gate.set()
        await gate.wait()


class FreePace:
    """Nobody waits."""

    async def wait(self) -> None:
        return None


Pace = Lockstep | FreePace


class Model:
    """The loop's `Generator`: as many tokens as the trajectory's work says, at the engine's speed."""

    def __init__(self, work: Mapping[str, Work], gpus: int, pace: Pace) -> None:
        self._work, self._pace = work, pace
        self._engine = Engine(gpus)
        self._turns = dict.fromkeys(work, 0)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        work, turn = self._work[request_id], self._turns[request_id]
        self._turns[request_id] += 1
        await self._engine.decode(work.tokens[turn])
        await self._pace.wait()
        last = ord(STOP) if turn < len(work.tool_seconds) else ord(".")
        return Generation([ord("x")] * (work.tokens[turn] - 1) + [last], stop_reason="stop")


class ToolServer:
    """The loop's `Tools`: as slow as the trajectory's work says, `workers` calls at a time."""

    def __init__(self, work: Mapping[str, Work], workers: int, pace: Pace) -> None:
        self._work, self._pace, self._workers = work, pace, asyncio.Semaphore(workers)

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        if not finish:
            assert step is not None
            async with self._workers:
                await asyncio.sleep(self._work[trajectory_id].tool_seconds[step])
            await self._pace.wait()
        return StepResult(trajectory_id, "ok")


class Letters:
    """The loop's `Tokenizer`: a token a character."""

    eos_token_ids = frozenset({0})
    special_tokens: tuple[str, ...] = ("\0",)

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        raise NotImplementedError("inline observations need no chat template")


def draw_work(n: int, turns: int, scenario: str, seed: int) -> dict[str, Work]:
    """`n` trajectories of `turns` tool turns, by trajectory id."""
    chance = random.Random(f"{seed}-{turns}-{scenario}")

    def tokens() -> int:
        return max(1, min(MOST_TOKENS, round(MEDIAN_TOKENS * math.exp(chance.gauss(0, SIGMA_TOKENS)))))

    def tool() -> float:
        if chance.random() < TIMEOUT_CHANCE[scenario]:
            return TOOL_TIMEOUT_SECONDS
        return min(TOOL_TIMEOUT_SECONDS, MEDIAN_TOOL_SECONDS * math.exp(chance.gauss(0, SIGMA_TOOL)))

    return {
        str(i): Work(tuple(tokens() for _ in range(turns + 1)), tuple(tool() for _ in range(turns))) for i in range(n)
    }


def bound(work: Mapping[str, Work], gpus: int, tool_workers: int) -> float:
    """Seconds that no order of the work can beat."""
    alone = step_seconds(1, gpus)
    longest = max(sum(w.tokens) * alone + sum(w.tool_seconds) for w in work.values())
    most = min(len(work), gpus * SEQUENCES_A_GPU)  # the fuller the engine, the more tokens a second
    decoding = sum(sum(w.tokens) for w in work.values()) * step_seconds(most, gpus) / most
    tools = sum(sum(w.tool_seconds) for w in work.values()) / tool_workers
    return max(longest, decoding, tools)


def simulate(work: Mapping[str, Work], gpus: int, tool_workers: int, lockstep: bool) -> float:
    """Simulated seconds that a rollout of `work` takes."""

    async def run() -> float:
        pace: Pace = Lockstep(len(work)) if lockstep else FreePace()
        options = EpisodeOptions(
            action_stop_tokens=(STOP,), max_turns=99, max_concurrent_trajectories=None, enable_tqdm=False
        )
        episode = Episode(Model(work, gpus, pace), ToolServer(work, tool_workers, pace), Letters(), options)
        started = asyncio.get_running_loop().time()
        trajectories = await rollout(episode, [RolloutStart([1], trajectory_id=i) for i in work])
        check(trajectories, work)
        return asyncio.get_running_loop().time() - started

    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def check(trajectories: Sequence[Trajectory], work: Mapping[str, Work]) -> None:
    """Raise if a trajectory did not do its work: the figures would mean nothing."""
    for trajectory in trajectories:
        todo = work[trajectory.trajectory_id]
        done = (sum(trajectory.response_mask), len(trajectory.calls), trajectory.stop.finished)
        if done != (sum(todo.tokens), len(todo.tool_seconds), True):
            raise RuntimeError(f"trajectory {trajectory.trajectory_id} did {done}, its work was {todo}")


def compare(scenario: str, turns: int, seed: int, n: int, gpus: int, tool_workers: int) -> Outcome:
    work = draw_work(n, turns, scenario, seed)
    lockstep = simulate(work, gpus, tool_workers, lockstep=True)
    cpu = time.process_time()
    free = simulate(work, gpus, tool_workers, lockstep=False)
    cpu_ms = (time.process_time() - cpu) * 1000 / (n * (turns + 1))
    return Outcome(scenario, turns, tool_workers, seed, lockstep, free, bound(work, gpus, tool_workers), cpu_ms)


def show(outcomes: Sequence[Outcome]) -> None:
    table = Table(title="Trajectory-level against batch-synchronous rollout (simulated seconds, mean over seeds)")
    for title in ("tools", "workers", "turns", "lockstep", "async", "speedup", "lowest", "bound", "bound/async"):
        table.add_column(title, justify="right")
    for kind in sorted({_kind(o) for o in outcomes}):
        some = [o for o in outcomes if _kind(o) == kind]
        table.add_row(
            *map(str, kind),
            f"{statistics.mean(o.lockstep_seconds for o in some):.1f}",
            f"{statistics.mean(o.async_seconds for o in some):.1f}",
            f"{statistics.mean(o.speedup for o in some):.2f}x",
            f"{min(o.speedup for o in some):.2f}x",
            f"{statistics.mean(o.bound_seconds for o in some):.1f}",
            f"{statistics.mean(o.bound_share for o in some):.0%}",
        )
    console = Console()
    console.print(table)
    console.print(f"Simulation and loop together took {outcomes[0].cpu_ms_per_turn:.2f} ms of CPU a turn.")


def _kind(outcome: Outcome) -> tuple[str, int, int]:
    return outcome.scenario, outcome.tool_workers, outcome.turns


def main(
    trajectories: Annotated[int, typer.Option(min=1)] = 2048,
    gpus: Annotated[int, typer.Option(min=1)] = 4,
    tool_workers: Annotated[list[int] | None, typer.Option(help="Calls at a time; may be repeated. [128]")] = None,
    turns: Annotated[list[int] | None, typer.Option(help="Tool turns; may be repeated. [1 and 3]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with seeds 0, 1, …")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every run here.")] = None,
) -> None:
    """Compare the two."""
    outcomes = [
        compare(scenario, n_turns, seed, trajectories, gpus, workers)
        for scenario in TIMEOUT_CHANCE
        for workers in tool_workers or [128]
        for n_turns in turns or [1, 3]
        for seed in range(seeds)
    ]
    show(outcomes)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        runs = [asdict(o) | {"speedup": o.speedup, "bound_share": o.bound_share} for o in outcomes]
        setting = {"trajectories": trajectories, "gpus": gpus}
        json_path.write_text(json.dumps({"setting": setting, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
