"""The viewer over many trajectories: to read them the first time, to open them, to sort, filter, search and scroll.

    python benchmarks/viewer.py --trajectories 1000000

Writes made records (about 2 KB each) into a temporary folder below --folder. Besides, what a training spends on keeping
the values of its tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, StopReason, Timings, Trajectory
from verl_tool.trainer.monitoring.token_records import TokenRecords
from verl_tool.viewer.record_index import RecordIndex
from verl_tool.viewer.record_query import Query, page
from verl_tool.viewer.run_files import Run

A_STEP = 1000
"""Trajectories of a file."""
PAGES = 50


def made_lines(draw: random.Random) -> list[bytes]:
    """The records of a step."""
    return [(made(number, draw).to_json() + "\n").encode() for number in range(A_STEP)]


def made(number: int, draw: random.Random) -> Trajectory:
    right = draw.random() < 0.5
    segments = [
        words(Author.PROMPT, f"What is {number} + {draw.randrange(99)}? Use the tools that you have.", draw),
        words(Author.MODEL, f"Let me compute it. <calculator>{number} + 1</calculator>", draw),
        words(Author.TOOL, f"\n<result>{number + 1}</result>\n", draw),
        words(Author.MODEL, f"So the answer is \\boxed{{{number + 1}}}.", draw),
    ]
    tool = draw.choice(["calculator", "search"])
    call = CallRecord(0, segments[1].text, segments[2].text, seconds=0.05, names=(tool,))
    timings = Timings(draw.random(), 0.05, 1.0)
    extra = {"index": number // 8, "reward_extra_info": {"acc": float(right)}}
    stop = draw.choice([StopReason.ANSWERED, StopReason.MAX_TURNS])
    identity = f"{draw.getrandbits(128):032x}"
    return Trajectory(identity, tuple(segments), stop, calls=(call,), reward=float(right), timings=timings, extra=extra)


def words(author: Author, text: str, draw: random.Random) -> Segment:
    tokens = tuple(draw.randrange(150_000) for _ in range(len(text) // 3))
    log_probs = tuple(-draw.expovariate(4.0) for _ in tokens) if author is Author.MODEL else None
    return Segment(author, tokens, log_probs, text)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that passed, and those of the processor, which other processes' load does not touch."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


Figures = dict[str, tuple[float, float]]
"""Seconds passed and processor's seconds, by what was done."""


def figures(folder: Path, trajectories: int) -> tuple[Figures, dict[str, float]]:
    """Times, and sizes in megabytes."""
    draw = random.Random(0)
    steps = max(1, trajectories // A_STEP)
    (folder / "trajectories").mkdir()
    lines = made_lines(draw)
    for step in range(1, steps + 1):
        # Lines in another order, so that the files differ.
        draw.shuffle(lines)
        (folder / "trajectories" / f"step_{step}.jsonl").write_bytes(b"".join(lines))
    run = Run("made", folder)
    told: Figures = {}
    told["read all the first time"] = timed(RecordIndex(run).refresh)
    index = RecordIndex(run)
    told["open with the index"] = timed(index.refresh)
    records = index.records
    count = len(records.rows)
    told["look for what is new, nothing is"] = timed(index.refresh)
    told["first page of a step"] = timed(lambda: page(records, Query(files=("step_1",)), 0, 200))
    told["sort all by reward, first page"] = timed(lambda: page(records, Query(sort="reward"), 0, 200))
    told["filter all by tool and reward, first page"] = timed(
        lambda: page(records, Query(tool="search", bounds=(("reward", 0.5, 1.0),)), 0, 200)
    )
    pages = [timed(lambda: page(records, Query(sort="reward"), draw.randrange(count), 200)) for _ in range(PAGES)]
    told["a page anywhere (200 rows), median"] = tuple(np.median(pages, axis=0).tolist())
    told["a page anywhere, slowest of 50"] = max(pages)
    told["search a step's texts"] = timed(lambda: page(records, Query(files=("step_1",), text="no such words"), 0, 200))
    index_bytes = sum(path.stat().st_size for path in (folder / "trajectories/.index").iterdir())
    record_bytes = sum(len(line) for line in lines) * steps
    return told, {"trajectories": count, "records": record_bytes / 1e6, "index": index_bytes / 1e6}


def token_records(folder: Path, trajectories: int, tokens: int) -> tuple[float, float]:
    """Times to keep the values of a step's tokens, the batch being there."""
    rows = [np.random.default_rng(0).random(tokens, "f4")] * trajectories
    columns = {"advantages": rows, "log_probs": rows, "mask": [np.ones(tokens, "u1")] * trajectories}
    return timed(lambda: TokenRecords(folder, 1).add(1, range(trajectories), columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=None, help="Default: the folder for temporary files.")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/viewer.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        told, sizes = figures(Path(folder), given.trajectories)
        told["keep the values of 1024 x 2048 tokens"] = token_records(Path(folder), 1024, 2048)
    table = Table("", "seconds", "of the processor")
    for name, values in told.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {value:,.0f}" for name, value in sizes.items()), "(records and index in MB)")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({**told, **sizes}, indent=2) + "\n")


if __name__ == "__main__":
    main()
