"""Memory of every process of a training over many steps: does any of them grow?

    python benchmarks/memory_growth.py --steps 200

Runs a recipe's small form (`PROFILE=cpu`), looks at all its processes every few seconds, fits a line to each role's
memory behind the first quarter of the steps, and draws the course. Memory is PSS, bytes of RAM with shared pages split
among those that share them (`/proc/PID/smaps_rollup`, proc(5)). What came of 200 steps: `assets/docs/memory_growth.md`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import psutil
import typer
from load import family_of
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RECIPE = "examples/train/gsm8k/train.sh"
MARK = "VERL_TOOL_MEMORY_RUN"
"""A variable that the run's processes inherit, but for those of the sandbox, which get none."""
ROLES = {
    r"AgentActorRolloutRefWorker|WorkerDict": "trainer's worker",
    r"vLLMHttpServer": "vLLM's server",
    r"VLLM::|EngineCore": "vLLM's engine",
    r"AgentLoopWorker": "agent loop",
    r"RewardLoopWorker": "rewards",
    r"AgentTaskRunner": "trainer",
    r"verl_tool.servers.ray_serve": "tool server's launcher",
    r"ServeReplica": "tool replica",
    r"inside\.forkserver": "sandbox",
    r"verl_tool.trainer.main_ppo": "launcher",
    r"gcs_server|raylet|dashboard|log_monitor|runtime_env|ray::IDLE|ServeController|ray-dashboard": "Ray",
}
"""Roles of processes by their title; the first that fits counts."""
MB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What all processes of one role held at one moment."""

    step: int
    seconds: float
    megabytes: dict[str, float]


def processes(mark: str) -> dict[int, str]:
    """Titles of the run's processes, by process id: those that bear the mark, and their descendants."""
    found = psutil.process_iter(["environ"])
    family = family_of(process.pid for process in found if (process.info["environ"] or {}).get(MARK) == mark)
    titles = {}
    for pid in family:
        with contextlib.suppress(psutil.Error):
            titles[pid] = " ".join(psutil.Process(pid).cmdline())
    return titles


def role_of(title: str) -> str:
    """The role of a process with this title."""
    return next((role for pattern, role in ROLES.items() if re.search(pattern, title)), "others")


def memory_of(pid: int) -> float:
    """PSS in megabytes; 0 if the process is gone."""
    try:
        return psutil.Process(pid).memory_full_info().pss / MB
    except psutil.Error:
        return 0.0


def look(run: Path, mark: str, started: float) -> Sample:
    """The run as it is now."""
    held: dict[str, float] = defaultdict(float)
    for pid, title in processes(mark).items():
        held[role_of(title)] += memory_of(pid)
    metrics = run / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Sample(max(steps, default=0), time.monotonic() - started, dict(held))


def watch(run: Path, steps: int, every: float, limit: float) -> list[Sample]:
    """Train, and look every so many seconds. Raises RuntimeError if the training fails or takes longer than `limit`."""
    mark, started = uuid.uuid4().hex, time.monotonic()
    settings = {"PROFILE": "cpu", "RUN": str(run), "STEPS": str(steps), "TEST_FREQ": "-1", MARK: mark}
    run.mkdir(parents=True, exist_ok=True)
    samples = []
    with (run / "printed.log").open("wb") as log, (run / "samples.jsonl").open("w", encoding="utf-8") as kept:
        process = subprocess.Popen(["bash", RECIPE], env=os.environ | settings, stdout=log, stderr=log)
        try:
            while process.poll() is None and time.monotonic() - started < limit:
                time.sleep(every)
                samples.append(look(run, mark, started))
                print(json.dumps(asdict(samples[-1])), file=kept, flush=True)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(120)
    if code != 0:
        raise RuntimeError(
            f"the training ended with {code} after {time.monotonic() - started:.0f} s: {run}/printed.log"
        )
    return samples


def growth(samples: list[Sample], role: str, steps: int) -> float:
    """Megabytes a step: slope of the least-squares line through a role's samples behind the first quarter."""
    late = [sample for sample in samples if sample.step >= steps / 4 and role in sample.megabytes]
    # In the last moments processes end one after the other.
    late = [sample for sample in late if sample.step < steps]
    if len({sample.step for sample in late}) < 2:
        return float("nan")
    slope, _ = np.polyfit([s.step for s in late], [s.megabytes[role] for s in late], 1)
    return float(slope)


def roles_in(samples: list[Sample]) -> list[str]:
    """All roles, the largest first."""
    peak: dict[str, float] = defaultdict(float)
    for sample in samples:
        for role, held in sample.megabytes.items():
            peak[role] = max(peak[role], held)
    return sorted(peak, key=lambda role: -peak[role])


def table(samples: list[Sample], steps: int) -> Table:
    """Memory at a quarter of the steps and at the end, and its growth."""
    result = Table("processes", f"MB at step {steps // 4}", f"MB at step {steps - 1}", "MB a step")
    middle = [sample for sample in samples if steps / 4 <= sample.step < steps]
    for role in roles_in(samples):
        first, last = (middle[i].megabytes.get(role, 0.0) for i in (0, -1))
        result.add_row(role, f"{first:.0f}", f"{last:.0f}", f"{growth(samples, role, steps):+.3f}")
    return result


def draw(samples: list[Sample], steps: int, path: Path) -> None:
    """Each role's memory against the step."""
    during = [sample for sample in samples if 0 < sample.step < steps]
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.set_prop_cycle(color=matplotlib.colormaps["tab20"].colors)
    for role in roles_in(during):
        axes.plot([s.step for s in during], [s.megabytes.get(role, 0.0) for s in during], label=role)
    axes.set(xlabel="step", ylabel="MB (PSS)", yscale="log", xlim=(0, steps))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    steps: Annotated[int, typer.Option("--steps", min=8)] = 200,
    run: Annotated[Path, typer.Option("--run", help="The run's folder; must be new.")] = Path("outputs/memory_growth"),
    every: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between two looks.")] = 5.0,
    limit: Annotated[float, typer.Option("--limit", help="Seconds after which the run is given up.")] = 5400.0,
    plot: Annotated[Path, typer.Option("--plot", help="Where the picture goes.")] = Path("memory_growth.png"),
) -> None:
    """Train and tell how memory grows. Samples go to `samples.jsonl` in the run's folder as they are taken."""
    if (run / "metrics.jsonl").exists():
        raise typer.BadParameter(f"{run} holds a run already; give a new folder", param_hint="--run")
    samples = watch(run, steps, every, limit)
    draw(samples, steps, plot)
    Console().print(table(samples, steps))


if __name__ == "__main__":
    typer.run(main)
