"""MT-GRPO as a reference: equation 12 of arXiv 2505.11821v2, token by token in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_tool.agent_loop.trajectory import Author, Trajectory

EPSILON = 1e-6


@dataclass(frozen=True)
class Row:
    """A trajectory: tokens of its turns and of observations between them, cut after `length` tokens."""

    group: int
    outcome: float
    turns: tuple[tuple[float, int, int], ...]
    """For each turn: its reward, its tokens, and those of the observation after it."""
    masked: bool = False
    """Whether it is in no loss, although its group contains it (`mask_overlong_loss`)."""

    @property
    def ids(self) -> list[int]:
        return [t for k, (_, own, seen) in enumerate(self.turns, 1) for t in [k] * own + [0] * seen]


def row_of(trajectory: Trajectory, turn_rewards: Sequence[float]) -> Row:
    """Read a row as a training recorded it. Its group is the row of the data."""
    assert trajectory.reward is not None
    turns: list[tuple[float, int, int]] = []
    for segment in trajectory.response:
        if segment.author is Author.MODEL:
            reward = turn_rewards[len(turns)] if len(turns) < len(turn_rewards) else 0.0
            turns.append((reward, len(segment.tokens), 0))
        else:
            reward, own, seen = turns[-1]
            turns[-1] = (reward, own, seen + len(segment.tokens))
    return Row(trajectory.extra["index"], trajectory.reward, tuple(turns), trajectory.excluded is not None)


def written_out(rows: list[Row], discount: float = 1.0, weight: float = 1.0, by_std: bool = True) -> list[list[float]]:
    """Compute equation 12 token by token."""

    def compared(mine: float, all_of_them: list[float], alone: float) -> float:
        n = len(all_of_them)
        if n == 1:
            return alone
        mean = sum(all_of_them) / n
        deviation = (sum((each - mean) ** 2 for each in all_of_them) / (n - 1)) ** 0.5
        return (mine - mean) / (deviation + EPSILON) if by_std else mine - mean

    told = []
    for row in rows:
        group = [other for other in rows if other.group == row.group]
        # verl's GRPO takes the reward itself for the advantage of a group of one.
        alone = row.outcome / (1 + EPSILON) if by_std else row.outcome
        outcome = compared(row.outcome, [other.outcome for other in group], alone)
        last = len(row.turns)
        own = []
        for k in range(last):
            reaching = [other.turns[k][0] for other in group if len(other.turns) > k]
            own.append(weight * compared(row.turns[k][0], reaching, 0.0))
        of_turn = {}
        for k in range(1, last + 1):
            later = sum(discount ** (turn - k) * own[turn - 1] for turn in range(k, last + 1))
            of_turn[k] = later + discount ** (last - k) * outcome
        told.append([of_turn[t] if t and not row.masked else 0.0 for t in row.ids])
    return told


def share_within(rows: list[Row], told: list[list[float]]) -> float:
    """Return the share of the variance of the loss tokens that lies within rows."""
    written = [
        [advantage for turn, advantage in zip(row.ids, line, strict=True) if turn]
        for row, line in zip(rows, told, strict=True)
        if not row.masked
    ]
    everything = [advantage for line in written for advantage in line]
    mean = sum(everything) / len(everything)
    within = sum((each - sum(line) / len(line)) ** 2 for line in written for each in line)
    return within / sum((each - mean) ** 2 for each in everything)
