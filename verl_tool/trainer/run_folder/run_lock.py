"""One training writes into a run's folder at a time, on whichever node of a shared file system it runs.

The lock is `filelock.SoftFileLease`: a file that names its owner's host, process and start (with the machine's boot),
and that the owner touches every `HEARTBEAT_SECONDS`. A process of this host that has ended holds it no longer. The end
of one on another host shows in a heartbeat that stays away.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import LeaseCompromise, OwnerRecord, SoftFileLease, Timeout

from verl_tool.errors import VerlToolError

LOCK_FILE = "run.lock"
LEASE_SECONDS = 90.0
"""Without a heartbeat for so long, a start on another host takes the folder over."""
HEARTBEAT_SECONDS = 15.0
_POLL_SECONDS = 0.5
_MARGIN_SECONDS = 10.0
_INITIAL_NAMESPACE = "effffffc"
"""The kernel's name of the first PID namespace (PROC_PID_INIT_INO)."""


class RunInUseError(VerlToolError):
    """Another training writes into the run's folder."""


class RunLostError(VerlToolError):
    """The lock of the run's folder was removed, or another start took it."""


@contextmanager
def run_lock(
    run: Path, notify: Callable[[str], None] = lambda _text: None, *, lease_seconds: float = LEASE_SECONDS
) -> Iterator[None]:
    """Hold the run's folder within the block. For the main thread of a process that SIGTERM interrupts.

    `notify` is called once if another host's heartbeat has to be waited for. Raises RunInUseError if a training in
    progress has the folder, and RunLostError in place of KeyboardInterrupt when the lock was lost on the way.
    """
    run.mkdir(parents=True, exist_ok=True)
    lost: list[LeaseCompromise] = []

    def on_lost(compromise: LeaseCompromise) -> None:
        lost.append(compromise)
        os.kill(os.getpid(), signal.SIGTERM)

    lease = SoftFileLease(
        run / LOCK_FILE,
        lease_duration=lease_seconds,
        heartbeat_interval=HEARTBEAT_SECONDS * lease_seconds / LEASE_SECONDS,
        on_compromise=on_lost,
        thread_local=False,
    )
    _acquire(lease, run, notify)
    try:
        yield
    except KeyboardInterrupt:
        if not lost:
            raise
        raise RunLostError(
            f"the lock {run / LOCK_FILE} was lost ({lost[0].reason}): somebody removed it, or another start took the "
            "folder while this process was stopped; see which training writes there now, and start again when none does"
        ) from None
    finally:
        lease.release()


def _acquire(lease: SoftFileLease, run: Path, notify: Callable[[str], None]) -> None:
    """Take the lease; that of another host, once its heartbeat has stayed away for long enough."""
    first: int | None = None
    deadline = time.monotonic() + lease.lease_duration + _MARGIN_SECONDS
    while True:
        try:
            lease.acquire(timeout=0)
        except Timeout:
            pass
        else:
            return
        owner, beat = lease.owner, _last_beat(run / LOCK_FILE)
        if owner is None or beat is None:  # just released, or not written yet
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
        elif first is None and not _runs_here(owner):
            notify(
                f"{run} was last used by {_describe(owner)}; waiting up to {lease.lease_duration:.0f} s for its "
                "heartbeat"
            )
        if owner is None or _runs_here(owner) or (first is not None and beat != first) or time.monotonic() > deadline:
            raise RunInUseError(
                f"{run} is in use by {_describe(owner)}: one training at a time writes into a folder. Wait for its "
                "end, or give another folder (run_dir; in a recipe RUN=...)"
            )
        first = beat
        time.sleep(_POLL_SECONDS)


def _describe(owner: OwnerRecord | None) -> str:
    return "an unknown process" if owner is None else f"process {owner.pid} on host {owner.hostname.partition('?')[0]}"


def _runs_here(owner: OwnerRecord) -> bool:
    """Whether its process id is one of this host and PID namespace, so that the lock itself saw that it is alive."""
    host, _, namespace = owner.hostname.partition("?pidns-")
    try:
        mine = f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        mine = _INITIAL_NAMESPACE
    return host == os.uname().nodename and (namespace or _INITIAL_NAMESPACE) == mine


def _last_beat(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
