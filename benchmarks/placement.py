"""Who finds a stateful trajectory again, and what it costs: the registry against owners that clients name.

    python benchmarks/placement.py --replicas 16 --trajectories 100000

Book-keeping only, in one process: no network, no Ray. All trajectories make a first call; then one replica dies,
another takes its place, and a third is drained, so that Serve lists it no more; then each trajectory makes a second
call, without a step number. Prints a table, and the same as JSON with --json.
"""

from __future__ import annotations

import argparse
import hmac
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_tool.protocol import ReplicaInfo
from verl_tool.rendezvous import owner as rendezvous_owner
from verl_tool.servers.cluster.placement import LOST, Placement

BATCH = 256
"""Trajectories in one question to the registry."""
KEY = b"shared by the replicas"
Outcomes = Counter[str]


class Cluster:
    """Replicas, and which trajectories each really holds."""

    def __init__(self, count: int) -> None:
        self.held: dict[str, set[str]] = {f"replica-{i}": set() for i in range(count)}
        self.listed = list(self.held)

    def change(self) -> str:
        """The first dies, a new one comes, the last is drained; the id of the dead one."""
        dead = self.listed.pop(0)
        del self.held[dead]
        self.listed.pop()
        self.held["replica-new"] = set()
        self.listed.append("replica-new")
        return dead

    def call(self, trajectory: str, replica: str) -> str:
        """What a call without a step finds there."""
        if trajectory in self.held[replica]:
            return "goes on"
        self.held[replica].add(trajectory)
        return "begins in silence"


def by_registry(cluster: Cluster, trajectories: Sequence[str]) -> Callable[[], Outcomes]:
    """The registry assigns owners; it sees the same changes."""
    placement = Placement(lost_ttl_seconds=3600.0)
    for replica in cluster.held:
        placement.join(ReplicaInfo(id=replica, url=""), [], draining=False, now=0.0)

    def turn() -> Outcomes:
        gone = {info.id for info in placement.view().replicas} - set(cluster.held)
        for replica in gone:
            placement.leave(replica, now=0.0)
        for replica in cluster.held:
            if placement.find(replica) is None:
                placement.join(ReplicaInfo(id=replica, url=""), [], draining=False, now=0.0)
            elif replica not in cluster.listed:
                placement.drain(replica)
        outcomes: Outcomes = Counter()
        for start in range(0, len(trajectories), BATCH):
            part = trajectories[start : start + BATCH]
            outcomes["questions"] += 1
            for trajectory, owner in zip(part, placement.claim(part, assign=True, now=0.0), strict=True):
                lost = owner.replica_id == LOST
                outcomes["state_lost" if lost else cluster.call(trajectory, owner.replica_id)] += 1
        return outcomes

    return turn


def pinned(cluster: Cluster, trajectories: Sequence[str]) -> Callable[[], Outcomes]:
    """The first answer names the owner, under a signature of the replicas'; the client sends both with every call."""
    pins: dict[str, tuple[str, bytes]] = {}

    def signature(owner: str) -> bytes:
        return hmac.digest(KEY, owner.encode(), "sha256")

    def turn() -> Outcomes:
        outcomes: Outcomes = Counter()
        for trajectory in trajectories:
            pin = pins.get(trajectory)
            if pin is None:
                owner = rendezvous_owner(trajectory, cluster.listed)
                pins[trajectory] = owner, signature(owner)
            else:
                owner = pin[0]
                assert hmac.compare_digest(pin[1], signature(owner))
            outcomes[cluster.call(trajectory, owner) if owner in cluster.held else "state_lost"] += 1
        return outcomes

    return turn


def not_pinned(cluster: Cluster, trajectories: Sequence[str], *, ask_all: bool) -> Callable[[], Outcomes]:
    """The owner is that of the list; with `ask_all` it asks all others about a trajectory that it does not know."""

    def turn() -> Outcomes:
        outcomes: Outcomes = Counter()
        for trajectory in trajectories:
            owner = rendezvous_owner(trajectory, cluster.listed)
            if ask_all and trajectory not in cluster.held[owner]:
                outcomes["questions"] += len(cluster.held) - 1
                owner = next((r for r, held in cluster.held.items() if trajectory in held), owner)
            outcomes[cluster.call(trajectory, owner)] += 1
        return outcomes

    return turn


WAYS: dict[str, Callable[[Cluster, Sequence[str]], Callable[[], Outcomes]]] = {
    "registry, any client": by_registry,
    "owner named and pinned": pinned,
    "no pin, owner of the list": lambda *given: not_pinned(*given, ask_all=False),
    "no pin, all are asked": lambda *given: not_pinned(*given, ask_all=True),
}


def measure(way: str, replicas: int, trajectories: int) -> dict[str, float | str]:
    """Both turns of one way."""
    ids = [f"trajectory-{i}" for i in range(trajectories)]
    cluster = Cluster(replicas)
    turn = WAYS[way](cluster, ids)
    began = time.process_time()
    first = turn()
    between = time.process_time()
    dead = len(next(iter(cluster.held.values())))
    cluster.change()
    changed = time.process_time()
    second = turn()
    return {
        "way": way,
        "first turn, us each": round((between - began) / trajectories * 1e6, 2),
        "second turn, us each": round((time.process_time() - changed) / trajectories * 1e6, 2),
        "questions": first["questions"] + second["questions"],
        "held by the dead": dead,
        "go on": second["goes on"],
        "state_lost": second["state_lost"],
        "begin in silence": second["begins in silence"],
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(way, options.replicas, options.trajectories) for way in WAYS]
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(map(str, row.values())))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
