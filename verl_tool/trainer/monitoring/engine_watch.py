"""Monitor the rollout engines. Without this, a weight sync with an engine that died would wait in silence."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Sequence

from verl_tool.trainer.monitoring.abort import TrainingAbortedError, abort_training

INTERVAL = 5.0
"""Seconds between two checks."""
TIMEOUT = 30.0
"""Deadline in seconds for an engine's server to answer. A late answer means a busy engine and not a dead one."""
REFUSALS = 3
"""Number of failed connections in a row after which a server counts as lost."""


class EngineLostError(TrainingAbortedError):
    """A rollout engine, or the server in front of it, has died."""


class EngineWatch:
    """Requests ``GET /health`` from each engine's server every few seconds. vLLM and SGLang answer 503 if one is
    dead."""

    def __init__(
        self,
        addresses: Sequence[str],
        on_lost: Callable[[EngineLostError], None] = abort_training,
        interval: float = INTERVAL,
    ) -> None:
        """`addresses` have the form ``host:port``. Empty ones are ignored."""
        self._refused = dict.fromkeys(filter(None, addresses), 0)
        self._on_lost = on_lost
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine watch", daemon=True)

    def start(self) -> None:
        """Watch until the end of the process, or until `stop` is called."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            for address in self._refused:
                lost = self._check(address)
                if lost is not None:
                    self._on_lost(lost)
                    return

    def _check(self, address: str) -> EngineLostError | None:
        try:
            status = _health(address)
        except (ConnectionError, http.client.HTTPException) as error:
            self._refused[address] += 1
            if self._refused[address] < REFUSALS:
                return None
            return EngineLostError(f"the server of the rollout engine at {address} is gone ({error}); {_ADVICE}")
        except OSError:
            # A late answer, or a transient network failure.
            return None
        self._refused[address] = 0
        if status == http.client.SERVICE_UNAVAILABLE:
            return EngineLostError(f"the rollout engine behind {address} died; {_ADVICE}")
        return None


_ADVICE = (
    "check its last messages above, and the kernel's log for a process killed for lack of memory "
    "(then lower rollout.gpu_memory_utilization, or the engine's number of concurrent requests); "
    "the same command resumes from the last checkpoint"
)


def _health(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()
