"""Looks after the rollout engines: one that died shows in a rollout as an error, in a weight sync as silence."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Sequence

from verl_tool.trainer.monitoring.abort import TrainingAbortedError, abort_training

INTERVAL = 5.0
"""Seconds between two looks."""
TIMEOUT = 30.0
"""Seconds that an engine's server has to answer. One that is busy is late; that is no death."""
REFUSALS = 3
"""Looks in a row that find nobody at an address, before its server counts as gone."""


class EngineLostError(TrainingAbortedError):
    """A rollout engine, or the server in front of it, is no more."""


class EngineWatch:
    """Asks each engine's server for ``GET /health`` every few seconds: vLLM's and SGLang's answer 503 for the dead."""

    def __init__(
        self,
        addresses: Sequence[str],
        on_lost: Callable[[EngineLostError], None] = abort_training,
        interval: float = INTERVAL,
    ) -> None:
        """Addresses as ``host:port``; an empty one is of an engine that there is not."""
        self._refused = dict.fromkeys(filter(None, addresses), 0)
        self._on_lost = on_lost
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine watch", daemon=True)

    def start(self) -> None:
        """Watch from now on, to the end of the process or `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            for address in self._refused:
                lost = self._look(address)
                if lost is not None:
                    self._on_lost(lost)
                    return

    def _look(self, address: str) -> EngineLostError | None:
        try:
            status = _health(address)
        except (ConnectionError, http.client.HTTPException) as error:
            self._refused[address] += 1
            if self._refused[address] < REFUSALS:
                return None
            return EngineLostError(f"the server of the rollout engine at {address} is gone ({error}); {_ADVICE}")
        except OSError:
            # Late, or a passing trouble of the network.
            return None
        self._refused[address] = 0
        if status == http.client.SERVICE_UNAVAILABLE:
            return EngineLostError(f"the rollout engine behind {address} died; {_ADVICE}")
        return None


_ADVICE = (
    "look above for its last words, and in the kernel's log for a process ended for want of memory "
    "(then lower rollout.gpu_memory_utilization, or what the engine holds at once); "
    "the same command goes on from the last checkpoint"
)


def _health(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()
