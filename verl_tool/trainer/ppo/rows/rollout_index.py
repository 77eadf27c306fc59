"""Which rows of a batch belong to the same rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutIndex:
    """Rows by rollout. Rollouts stand in the order of their first rows, the rows of each in that of their numbers."""

    keys: tuple[str, ...]
    """The rows' keys in TransferQueue: ``{prompt}_{sample}_{row}``."""
    rollouts: tuple[tuple[int, ...], ...]
    """Of each rollout, its rows as places in `keys`."""

    @classmethod
    def of(cls, keys: Sequence[str]) -> RolloutIndex:
        """Group `keys` by rollout."""
        groups: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            groups.setdefault(rollout_of(key), []).append(place)
        for places in groups.values():
            if len(places) > 1:
                places.sort(key=lambda place: _row_number(keys[place]))
        return cls(tuple(keys), tuple(map(tuple, groups.values())))

    def __len__(self) -> int:
        """The number of rollouts."""
        return len(self.rollouts)

    @property
    def has_several(self) -> bool:
        """Whether a rollout has more than one row."""
        return len(self.rollouts) < len(self.keys)

    @cached_property
    def final(self) -> list[int]:
        """The last row of each rollout, which carries its record and its reward."""
        return [places[-1] for places in self.rollouts]

    @cached_property
    def rollout_by_row(self) -> list[int]:
        """The rollout of each row, as a place in `rollouts`."""
        by_row = [0] * len(self.keys)
        for rollout, places in enumerate(self.rollouts):
            for place in places:
                by_row[place] = rollout
        return by_row

    def reduce(self, values: Sequence[T], combine: Callable[[Iterable[T]], T]) -> list[T]:
        """Combine one value a row to one value a rollout."""
        return [combine(values[place] for place in places) for places in self.rollouts]

    def spread(self, values: Sequence[T]) -> list[T]:
        """Give each row the value of its rollout."""
        return [values[rollout] for rollout in self.rollout_by_row]


def rollout_of(key: str) -> str:
    """The key of a row's rollout."""
    return key.rsplit("_", 1)[0]


def prompt_of(key: str) -> str:
    """The prompt that a row is a sample of."""
    return key.rsplit("_", 2)[0]


def _row_number(key: str) -> int:
    return int(key.rsplit("_", 1)[1])
