"""What it costs that the rollouts of a batch are cut into several training rows.

    python benchmarks/rows.py --json outputs/benchmarks/rows.json

One batch of rollouts is cut into 1, 2, 4 and 8 rows each. A row of ``compaction`` is fed the prompt and a summary
again, one of ``window`` the prompt and the piece before it. An update runs a small Qwen2 forwards and backwards
over all rows, in micro-batches of one length; its time a token should be that of the uncut batch. ``driver`` is the
work of the trainer's own process: the order of rows, advantages, weights. verl's own functions for several rows run
beside it; with them the advantages and the number of optimizer steps depend on the cut (assets/docs/rows.md).
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl import DataProto
from verl_tool.agent_workers.rollout_weights import rollout_weights
from verl_tool.trainer.ppo.rows.joined_rows import joining, on_rollouts
from verl_tool.trainer.ppo.rows.mini_batches import lay_out
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex

SAMPLES = 4
MINI_BATCHES = 4
VOCABULARY = 512
MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Shape:
    """Tokens of a rollout."""

    prompt: int
    response: int
    summary: int


@dataclass(frozen=True)
class Cell:
    """One cut of the batch."""

    kind: str
    rows_per_rollout: int
    tokens: int
    update_seconds: float
    microseconds_per_token: float
    update_mib: float
    """What a process grows by at its peak."""
    driver_ms: float
    verl_driver_ms: float
    driver_mib: float
    verl_driver_mib: float
    dummy_rows: int
    verl_dummy_rows: int
    optimizer_steps: int
    verl_optimizer_steps: int


def prompt_lengths(kind: str, rows: int, shape: Shape) -> list[int]:
    """Tokens that each row of a rollout is fed before it is written."""
    again = shape.summary if kind == "compaction" else shape.response // rows
    return [shape.prompt + (again if row else 0) for row in range(rows)]


def keys_of(rollouts: int, rows: int) -> list[str]:
    """As verl names the rows of a batch."""
    return [f"p{i // SAMPLES:04}_{i % SAMPLES}_{row}" for i in range(rollouts) for row in range(rows)]


def batch_of(keys: list[str], length: int) -> DataProto:
    """What the trainer's advantage functions take, each row with `length` tokens; the reward is on the last row's."""
    n = len(keys)
    random = torch.Generator().manual_seed(0)
    rewards = torch.zeros(n, length)
    rewards[:, -1] = torch.rand(n, generator=random)
    index = RolloutIndex.of(keys)
    rewards[[row for row in range(n) if row not in set(index.final)]] = 0.0
    columns = {
        "response_mask": torch.ones(n, length, dtype=torch.int64),
        "token_level_rewards": rewards,
        "values": torch.rand(n, length, generator=random),
    }
    uids = np.array([key.split("_")[0] for key in keys], dtype=object)
    return DataProto(batch=TensorDict(columns, batch_size=n), non_tensor_batch={"uid": uids})


def advantages(compute: Callable[..., DataProto], keys: list[str], length: int) -> Any:
    """Advantages of GRPO by verl's function or by ours."""
    config = OmegaConf.create({"use_pf_ppo": False})
    return compute(batch_of(keys, length), batch_keys=keys, adv_estimator="grpo", num_repeat=SAMPLES, config=config)


def drive(keys: list[str], length: int, work: list[int]) -> Any:
    """What the trainer's process does for an update of rollouts."""
    index = RolloutIndex.of(keys)
    prompts = len(keys) // (SAMPLES * max(1, len(index.rollouts[0])))
    layout = lay_out(keys, work, max(1, prompts // MINI_BATCHES), 1, seed=0)
    with joining(index, [length] * len(keys)):
        advantages(on_rollouts(compute_advantage_for_multi_trajectories), keys, length)
    rollout_weights(index.rollout_by_row, torch.full((len(keys),), length))
    return layout


def update(model: Qwen2ForCausalLM, lengths: list[tuple[int, int]]) -> None:
    """Forwards and backwards over all rows, in micro-batches of rows of one length; lengths: prompt and response."""
    for (prompt, response), count in Counter(lengths).items():
        size = max(1, MICRO_BATCH_TOKENS // (prompt + response))
        for start in range(0, count, size):
            ids = torch.randint(0, VOCABULARY, (min(size, count - start), prompt + response))
            logits = model(ids).logits[:, prompt - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten())
            loss.backward()
    model.zero_grad()


def timed(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The least seconds of `repeats` calls, and what the last one gave."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - began)
    return min(seconds), result


def measure_growth(part: str, kind: str, rows: int, rollouts: int, shape: Shape) -> float:
    """MiB by which this process grows at its peak for `part` of a step. Call it in a process of its own."""
    torch.set_num_threads(1)
    keys, length, lengths = cut_batch(kind, rows, rollouts, shape)
    work = [prompt + response for prompt, response in lengths]
    model = make_model()
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (proc(5))
    began = _peak_kib(status)
    if part == "update":
        update(model, lengths)
    elif part == "driver":
        drive(keys, length, work)
    else:
        advantages(compute_advantage_for_multi_trajectories, keys, length)
    return (_peak_kib(status) - began) / 1024


def _peak_kib(status: Path) -> int:
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


def growth_in_child(*arguments: Any) -> float:
    """`measure_growth` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_growth, *arguments).result(timeout=600)


def cut_batch(kind: str, rows: int, rollouts: int, shape: Shape) -> tuple[list[str], int, list[tuple[int, int]]]:
    """Keys of the rows, the response tokens of each, and prompt and response of each."""
    keys, length = keys_of(rollouts, rows), shape.response // rows
    prompts = prompt_lengths(kind, rows, shape)
    return keys, length, [(prompts[i % rows], length) for i in range(len(keys))]


def make_model() -> Qwen2ForCausalLM:
    """A small one with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return Qwen2ForCausalLM(config)


def measure(
    model: Qwen2ForCausalLM, kind: str, rows: int, rollouts: int, shape: Shape, repeats: int, memory: bool
) -> Cell:
    """One cut of the batch."""
    keys, length, lengths = cut_batch(kind, rows, rollouts, shape)
    tokens = sum(prompt + response for prompt, response in lengths)
    seconds, _ = timed(lambda: update(model, lengths), repeats)
    work = [prompt + response for prompt, response in lengths]
    driver, layout = timed(lambda: drive(keys, length, work), repeats)
    stock, _ = timed(lambda: advantages(compute_advantage_for_multi_trajectories, keys, length), repeats)
    nominal = rollouts // MINI_BATCHES
    return Cell(
        kind=kind,
        rows_per_rollout=rows,
        tokens=tokens,
        update_seconds=seconds,
        microseconds_per_token=1e6 * seconds / tokens,
        update_mib=growth_in_child("update", kind, rows, rollouts, shape) if memory else 0.0,
        driver_ms=1e3 * driver,
        verl_driver_ms=1e3 * stock,
        driver_mib=growth_in_child("driver", kind, rows, rollouts, shape) if memory else 0.0,
        verl_driver_mib=growth_in_child("verl", kind, rows, rollouts, shape) if memory else 0.0,
        dummy_rows=layout.num_dummies,
        verl_dummy_rows=-len(keys) % nominal,
        optimizer_steps=layout.num_mini_batches,
        verl_optimizer_steps=-(-len(keys) // nominal),
    )


def table_of(cells: list[Cell]) -> Table:
    """The cells, with the time of a token against that of the uncut batch."""
    table = Table(title="A batch cut into rows")
    for name in (
        "kind",
        "rows",
        "tokens",
        "update s",
        "time a token",
        "MiB",
        "driver ms (verl)",
        "MiB (verl)",
        "dummies (verl)",
        "steps (verl)",
    ):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    uncut = {cell.kind: cell.microseconds_per_token for cell in cells if cell.rows_per_rollout == 1}
    for cell in cells:
        table.add_row(
            cell.kind,
            str(cell.rows_per_rollout),
            f"{cell.tokens:,}",
            f"{cell.update_seconds:.2f}",
            f"{cell.microseconds_per_token / uncut[cell.kind]:.2f}x",
            f"{cell.update_mib:.0f}",
            f"{cell.driver_ms:.1f} ({cell.verl_driver_ms:.1f})",
            f"{cell.driver_mib:.0f} ({cell.verl_driver_mib:.0f})",
            f"{cell.dummy_rows} ({cell.verl_dummy_rows})",
            f"{cell.optimizer_steps} ({cell.verl_optimizer_steps})",
        )
    return table


def main(
    rollouts: Annotated[int, typer.Option(help="Of a batch; a multiple of 16.")] = 64,
    response: Annotated[int, typer.Option(help="Tokens that are written in a rollout.")] = 512,
    prompt: Annotated[int, typer.Option(help="Tokens of its prompt.")] = 64,
    summary: Annotated[int, typer.Option(help="Tokens of a summary.")] = 32,
    repeats: Annotated[int, typer.Option(help="The best of so many is taken.")] = 3,
    memory: Annotated[bool, typer.Option(help="Measure memory too, in a process for each figure.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the cells here.")] = None,
) -> None:
    """Measure and print."""
    if rollouts % (SAMPLES * MINI_BATCHES):
        raise typer.BadParameter(f"--rollouts is {rollouts}; give a multiple of {SAMPLES * MINI_BATCHES}")
    shape = Shape(prompt, response, summary)
    model = make_model()
    update(model, [(prompt, response)])
    cuts = [(kind, rows) for kind in ("compaction", "window") for rows in (1, 2, 4, 8)]
    cells = [measure(model, kind, rows, rollouts, shape, repeats, memory) for kind, rows in track(cuts, "cuts")]
    Console().print(table_of(cells))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    typer.run(main)
