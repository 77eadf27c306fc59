"""Abort a training that makes no progress. Some failures, such as a lost weight receiver, raise no error."""

from __future__ import annotations

import faulthandler
import threading
import time

from verl_tool.trainer.monitoring.abort import TrainingAbortedError, abort_training


class StalledError(TrainingAbortedError):
    """The training made no progress for too long."""


class Watchdog:
    """Aborts the training if `enter` is not called for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._phase = "start"
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch until the end of the process."""
        self.enter("start")
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Report progress: the training enters `phase`."""
        with self._lock:
            self._phase, self._since = phase, time.monotonic()

    def _watch(self) -> None:
        while True:
            with self._lock:
                phase, silent = self._phase, time.monotonic() - self._since
            if silent > self._seconds:
                break
            time.sleep(min(1.0, self._seconds / 10))
        faulthandler.dump_traceback(all_threads=True)
        abort_training(
            StalledError(
                f"no progress for {silent:.0f} s in the phase {phase!r} (stall_timeout={self._seconds} s): "
                "a rollout worker, the tool server or a weight receiver may have died; check the last error above. "
                "Raise stall_timeout if a step takes that long."
            )
        )
