"""Ends a training that makes no progress: some losses, of a weight receiver say, show as nothing but silence."""

from __future__ import annotations

import faulthandler
import threading
import time

from verl_tool.trainer.monitoring.abort import TrainingAbortedError, abort_training


class StalledError(TrainingAbortedError):
    """Nothing was done for too long."""


class Watchdog:
    """Ends the training when it was told nothing for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._phase = "start"
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on, to the end of the process."""
        self.enter("start")
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Tell that something has been done, and what is done next."""
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
                "a rollout worker, the tool server or a weight receiver may be gone; look for the last error above. "
                "Raise stall_timeout if a step takes that long."
            )
        )
