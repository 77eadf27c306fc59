"""Mini-batches of whole prompts, whatever the number of rows that their rollouts are cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_tool.trainer.ppo.rows.rollout_index import prompt_of

DUMMY = -1
"""In place of a row: one without a token in the loss, which fills up a mini-batch."""


@dataclass(frozen=True)
class MiniBatchLayout:
    """The order of a batch's rows, which a trainer cuts into equal parts: by rank, and in each rank by mini-batch."""

    order: list[int]
    """Places of rows in the batch, and `DUMMY`."""
    num_mini_batches: int

    @property
    def num_dummies(self) -> int:
        """Rows that fill up."""
        return self.order.count(DUMMY)


def lay_out(
    keys: Sequence[str],
    work: Sequence[float],
    prompts_per_mini_batch: int,
    ranks: int,
    multiple: Callable[[int], int] = lambda _: 1,
) -> MiniBatchLayout:
    """Put the rollouts of each prompt into one mini-batch, and balance the work of its rows over the ranks.

    Prompts are taken in the order of their names, so that a cut of their rollouts changes no mini-batch. work: of each
    row. multiple: what the rows of a rank in one mini-batch are a multiple of, by the number of mini-batches.
    """
    prompts = sorted({prompt_of(key) for key in keys})
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
    """At most `size` rows a rank: each row, those with the most work first, to the rank that has least to do."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for row in sorted(rows, key=lambda row: (-work[row], row)):
        rank = min((r for r in range(ranks) if len(parts[r]) < size), key=totals.__getitem__)
        parts[rank].append(row)
        totals[rank] += work[row]
    return parts
