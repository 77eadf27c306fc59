"""Group the rows of a batch by rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutIndex:
    """Rows by rollout. Rollouts have the order of their first rows, and the rows of a rollout that of their numbers."""

    keys: tuple[str, ...]
    """Keys of the rows in TransferQueue: ``{prompt}_{sample}_{row}``."""
    rollouts: tuple[tuple[int, ...], ...]
    """Rows of each rollout, as indices of `keys`."""

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
        """Return the number of rollouts."""
        return len(self.rollouts)

    @property
    def has_several(self) -> bool:
        """Whether any rollout has more than one row."""
        return len(self.rollouts) < len(self.keys)

    @cached_property
    def final(self) -> list[int]:
        """The last row of each rollout, which has its record and its reward."""
        return [places[-1] for places in self.rollouts]

    @cached_property
    def rollout_by_row(self) -> list[int]:
        """The rollout of each row, as an index of `rollouts`."""
        by_row = [0] * len(self.keys)
        for rollout, places in enumerate(self.rollouts):
            for place in places:
                by_row[place] = rollout
        return by_row

    def reduce(self, values: Sequence[T], combine: Callable[[Iterable[T]], T]) -> list[T]:
        """Combine the values of the rows of each rollout to one."""
        return [combine(values[place] for place in places) for places in self.rollouts]

    def spread(self, values: Sequence[T]) -> list[T]:
        """Return the value of its rollout for each row."""
        return [values[rollout] for rollout in self.rollout_by_row]


def rollout_of(key: str) -> str:
    """Return the key of a row's rollout."""
    return key.rsplit("_", 1)[0]


def prompt_of(key: str) -> str:
    """Return the prompt of a row."""
    return key.rsplit("_", 2)[0]


def _row_number(key: str) -> int:
    return int(key.rsplit("_", 1)[1])
