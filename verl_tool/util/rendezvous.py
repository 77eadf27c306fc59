"""Rendezvous hashing: which of several replicas a trajectory belongs to.

Every party that knows the same replica identities comes to the same owner without talking to another. When a replica
leaves, only its own trajectories get another owner; when one joins, it takes an equal share and nothing else moves
(Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).

This module imports nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

_MASK = (1 << 64) - 1


def owner(trajectory_id: str, replica_ids: Sequence[str]) -> str:
    """The replica of `replica_ids` that `trajectory_id` belongs to, whatever the order of `replica_ids`.

    Raises ValueError if there are none.
    """
    if not replica_ids:
        raise ValueError("no replica to choose an owner from")
    if len(replica_ids) == 1:
        return replica_ids[0]
    key = _digest(trajectory_id)
    # Equal weights of two replicas are settled by name, so that all parties agree.
    return max(replica_ids, key=lambda replica_id: (_mix(key ^ _replica_digest(replica_id)), replica_id))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@lru_cache(maxsize=4096)
def _replica_digest(replica_id: str) -> int:
    return _digest("replica\0" + replica_id)


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit moves every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
