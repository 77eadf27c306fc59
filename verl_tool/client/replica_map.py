"""Choose the replica of a server to which a client sends a trajectory."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from verl_tool.protocol import ReplicaInfo, ReplicaList
from verl_tool.util.rendezvous import owner

REFRESH_SECONDS = 5.0
"""Age at which the list of replicas is requested again."""
_ASK_AGAIN_SECONDS = 1.0
"""Delay after a failed request for the list."""
_AVOID_SECONDS = 10.0
"""How long an unreachable replica is avoided. Others serve its trajectories meanwhile."""
_MAX_REMEMBERED = 200_000


class ReplicaMap:
    """Maps trajectories to replicas by rendezvous hashing over the list of ``GET /replicas``.

    A trajectory with state stays at the replica that answered it (`pin`) while that replica can be reached, even if it
    has left the list. The choice can be wrong if replicas have joined or left since the trajectory began. The replica
    then forwards the request to the right one, so that a wrong choice only costs a hop.
    """

    def __init__(self, front: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._front = front
        self._clock = clock
        self._urls: dict[str, str] = {}
        self._ids: list[str] = []
        self._sticky = False
        self._avoided: dict[str, float] = {}
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._started: OrderedDict[str, None] = OrderedDict()
        self._stale_at = 0.0
        self.was_requested = False
        """Whether the list of replicas was ever requested."""

    def is_stale(self) -> bool:
        """Return whether the list must be requested again."""
        return self._clock() >= self._stale_at

    def keep(self) -> None:
        """Keep the current list after a failed request, and retry soon."""
        self.was_requested = True
        self._stale_at = self._clock() + _ASK_AGAIN_SECONDS

    def distrust(self) -> None:
        """Drop all replicas, because another server answered at the address of one, and request a new list."""
        self._urls, self._ids = {}, []
        self._places.clear()
        self._stale_at = 0.0

    def renew(self, replicas: ReplicaList | None) -> None:
        """Set a new list; None if the server has none."""
        self.was_requested = True
        self._stale_at = self._clock() + REFRESH_SECONDS
        if replicas is None:
            self._urls, self._ids = {}, []
            return
        self._urls = {r.id: r.url.rstrip("/") for r in replicas.replicas if _reachable(r, self._front)}
        self._ids = sorted(self._urls)
        self._sticky = replicas.sticky

    def url_of(self, trajectory_id: str) -> str:
        """Return the base URL for this trajectory: that of its replica, of another replica, which forwards, or of the
        server."""
        place = self._places.get(trajectory_id)
        if place is None or not (place.replica_id in self._urls or (place.pinned and self._sticky)):
            if not self._ids:
                return self._front
            replica_id = owner(trajectory_id, self._ids)
            place = self._remember(trajectory_id, _Place(replica_id, self._urls[replica_id], False))
        if not self._is_avoided(place.url):
            return place.url
        others = [other for other in self._ids if not self._is_avoided(self._urls[other])]
        return self._urls[owner(trajectory_id, others)] if others else self._front

    def pin(self, trajectory_id: str, url: str) -> None:
        """Record that the replica at `url` has answered this trajectory without a fault."""
        self.mark_started(trajectory_id)
        place = self._places.get(trajectory_id)
        if place is not None and place.url == url and not place.pinned:
            self._places[trajectory_id] = replace(place, pinned=True)

    def mark_started(self, trajectory_id: str) -> None:
        """Record that the server knows this trajectory. Until `forget`, no replica may treat it as a new one."""
        self._started[trajectory_id] = None
        if len(self._started) > _MAX_REMEMBERED:
            self._started.popitem(last=False)

    def has_started(self, trajectory_id: str) -> bool:
        """Return whether any replica of the server has known this trajectory."""
        return trajectory_id in self._started

    def place(self, trajectory_id: str, replica_id: str) -> None:
        """Record that a replica reported to hold this trajectory."""
        if replica_id in self._urls:
            self._remember(trajectory_id, _Place(replica_id, self._urls[replica_id], True))

    def forget(self, trajectory_id: str) -> None:
        """Forget a trajectory that has ended."""
        self._places.pop(trajectory_id, None)
        self._started.pop(trajectory_id, None)

    def avoid(self, url: str) -> None:
        """Avoid the replica at `url`, which did not answer, for a while, and request a new list."""
        if url != self._front:
            self._avoided = {known: until for known, until in self._avoided.items() if until > self._clock()}
            self._avoided[url] = self._clock() + _AVOID_SECONDS
            self._stale_at = 0.0

    def _is_avoided(self, url: str) -> bool:
        return self._avoided.get(url, 0.0) > self._clock()

    def _remember(self, trajectory_id: str, place: _Place) -> _Place:
        self._places[trajectory_id] = place
        if len(self._places) > _MAX_REMEMBERED:
            self._places.popitem(last=False)
        return place


@dataclass(frozen=True)
class _Place:
    """The replica to which a trajectory is sent."""

    replica_id: str
    url: str
    pinned: bool
    """Whether the replica has answered the trajectory."""


def _reachable(replica: ReplicaInfo, front: str) -> bool:
    """Return whether a client that uses `front` can reach a replica. From another machine, loopback addresses fail."""
    return not _is_loopback(replica.url) or _is_loopback(front)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
