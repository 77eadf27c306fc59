"""A run with made trajectories, in the form of a training."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

from verl_tool.agent_loop.trajectory import (
    Author,
    CallRecord,
    Segment,
    StopReason,
    Timings,
    Trajectory,
    read_jsonl,
    write_jsonl,
)
from verl_tool.protocol import Fault, FaultKind
from verl_tool.trainer.monitoring.token_records import TokenRecords

HOSTILE = (
    "<script>window.taken = 1</script><img src=x onerror='window.taken = 1'>\x00\x07\x1b[31m\x7f"
    "\u202efdp.exe\u2066\u200b\u2028javascript:window.taken=1 \ud7ff</textarea></script><svg onload=window.taken=1>"
)
MEGABYTE = "A" * (1 << 20)


def _words(text: str, author: Author, draw: random.Random) -> Segment:
    tokens = tuple(5 + zlib.crc32(word.encode()) % 900 for word in text.split(" "))
    log_probs = tuple(-draw.expovariate(3.0) for _ in tokens) if author is Author.MODEL else None
    return Segment(author, tokens, log_probs, text)


def made_trajectory(problem: int, sample: int, step: int, draw: random.Random) -> Trajectory:
    """Make a trajectory of a policy that learns to call the calculator. In problem 0 a tool fails, and problem 1 is
    hostile text."""
    right = draw.random() < 0.2 + 0.1 * step
    tool = "calculator" if right or draw.random() < 0.5 else "search"
    prompt = HOSTILE if problem == 1 else f"<|im_start|>user\nWhat is {problem} + {problem}?<|im_end|>\n"
    action = f"<{tool}>{problem} + {problem}</{tool}>"
    fault = Fault(kind=FaultKind.OVERLOADED, message="the queue is full", retryable=True) if problem == 0 else None
    observation = "" if fault else HOSTILE if problem == 1 else f"\n<result>{2 * problem}</result>\n"
    call = CallRecord(
        0, action, observation, fault=fault, metrics={"error": float(tool == "search")}, seconds=0.2, names=(tool,)
    )
    segments = [_words(prompt, Author.PROMPT, draw), _words(action, Author.MODEL, draw)]
    if fault is None:
        answer = f"\\boxed{{{2 * problem if right else 7}}}"
        segments += [_words(observation, Author.TOOL, draw), _words(answer, Author.MODEL, draw)]
    return Trajectory(
        f"{step}-{problem}-{sample}",
        tuple(segments),
        StopReason.FAULT if fault else StopReason.ANSWERED,
        calls=(call,),
        fault=fault,
        reward=None if fault else float(right),
        timings=Timings(0.5, 0.2, 0.8, (0.5,) if fault else (0.1, 0.4)),
        extra={"index": problem, "step": step, "reward_extra_info": {"acc": float(right)}},
    )


def made_run(folder: Path, steps: int = 4, problems: int = 6, samples: int = 4, seed: int = 0) -> Path:
    """Write metrics, a config and `steps` files of records to `folder`."""
    draw = random.Random(seed)
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"data:\n  seed: {seed}\n  train_batch_size: {problems}\nrun_dir: {folder}\n")
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            write_step(folder, step, problems, samples, draw)
            data = {"critic/score/mean": 0.2 + 0.1 * step, "agent/success/mean": 0.2 + 0.1 * step, "agent/faulted": 0.1}
            data |= {"timing_s/gen": 3.0, "timing_s/update_actor": 2.0, "timing_s/step": 5.5, "actor/entropy": 1 / step}
            metrics.write(json.dumps({"step": step, "data": data}) + "\n")
    return folder


def write_step(folder: Path, step: int, problems: int, samples: int, draw: random.Random) -> None:
    """Write the records of one step."""
    made = [made_trajectory(problem, j, step, draw) for problem in range(problems) for j in range(samples)]
    write_jsonl(folder / "trajectories" / f"step_{step}.jsonl", made)


def write_tokens(folder: Path, step: int) -> None:
    """Write a trainer's token data of a step: advantages of 1 or -1, and probabilities above the engine's."""
    made = list(read_jsonl(folder / "trajectories" / f"step_{step}.jsonl"))
    tokens: dict[str, list[Any]] = {
        "advantages": [[1.0 if t.reward else -1.0] * len(t.response_ids) for t in made],
        "log_probs": [[p * 0.9 for p in t.response_log_probs or ()] for t in made],
        "mask": [t.loss_mask for t in made],
    }
    TokenRecords(folder / "trajectories", 1).add(step, range(len(made)), tokens)
