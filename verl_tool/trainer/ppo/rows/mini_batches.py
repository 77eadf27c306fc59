"""Lay out mini-batches of whole prompts, independent of the number of rows per rollout."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_tool.trainer.ppo.rows.rollout_index import prompt_of

DUMMY = -1
"""Stands for a row without tokens in the loss, which fills up a mini-batch."""


@dataclass(frozen=True)
class MiniBatchLayout:
    """Order of a batch's rows. The trainer splits it equally by rank, and within each rank by mini-batch."""

    order: list[int]
    """Indices of rows in the batch, and `DUMMY`."""
    num_mini_batches: int

    @property
    def num_dummies(self) -> int:
        """Number of dummy rows."""
        return self.order.count(DUMMY)


def lay_out(
    keys: Sequence[str],
    work: Sequence[float],
    prompts_per_mini_batch: int,
    ranks: int,
    multiple: Callable[[int], int] = lambda _: 1,
    *,
    seed: int,
) -> MiniBatchLayout:
    """Assign all rollouts of a prompt to the same mini-batch, and balance the work of its rows over the ranks.

    Prompts are shuffled from the order of their first rows, since those that finish first are the short ones. The
    mini-batches do not depend on cuts of rollouts, and an update that is repeated from the records has those of the
    run.

    Args:
        keys: keys of the rows in TransferQueue.
        work: work of each row, in any unit.
        prompts_per_mini_batch: number of prompts in a mini-batch.
        ranks: number of ranks.
        multiple: returns, for the number of mini-batches, what the number of rows per rank in a mini-batch must be a
            multiple of.
        seed: of the order of prompts.
    """
    prompts = list(dict.fromkeys(prompt_of(key) for key in keys))
    random.Random(seed).shuffle(prompts)
    chunks = [prompts[i : i + prompts_per_mini_batch] for i in range(0, len(prompts), prompts_per_mini_batch)]
    mini_batch_by_prompt = {prompt: i for i, chunk in enumerate(chunks) for prompt in chunk}
    rows: list[list[int]] = [[] for _ in chunks]
    for place, key in enumerate(keys):
        rows[mini_batch_by_prompt[prompt_of(key)]].append(place)
    per_rank = -(-max(map(len, rows)) // ranks)
    factor = multiple(len(chunks))
    per_rank = -(-per_rank // factor) * factor
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for each in rows:
        for rank, part in enumerate(_balance(each, work, ranks, per_rank)):
            by_rank[rank] += part + [DUMMY] * (per_rank - len(part))
    return MiniBatchLayout([place for part in by_rank for place in part], len(chunks))


def _balance(rows: Sequence[int], work: Sequence[float], ranks: int, size: int) -> list[list[int]]:
    """Distribute rows, at most `size` per rank. Each goes to the rank with the least work, the largest rows first."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for row in sorted(rows, key=lambda row: (-work[row], row)):
        rank = min((r for r in range(ranks) if len(parts[r]) < size), key=totals.__getitem__)
        parts[rank].append(row)
        totals[rank] += work[row]
    return parts
