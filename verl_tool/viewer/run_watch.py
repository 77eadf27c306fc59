"""The runs that are looked at, followed while somebody looks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from verl_tool.errors import VerlToolError
from verl_tool.trainer.monitoring.run_metrics import Metrics, metrics_files, read_metrics
from verl_tool.viewer.record_index import RecordIndex, Records
from verl_tool.viewer.run_files import Run, find_runs

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often a run is looked at for what is new."""
FORGET_SECONDS = 60.0
"""After these without a request nobody follows a run any more."""
FIRST_SECONDS = 1.0
"""How long the first request of a run waits for its index."""


class UnknownRunError(VerlToolError):
    """There is no such run."""


class RunWatch:
    """Runs below some folders, and the index of each that was asked for. Threads may share it."""

    def __init__(self, roots: Sequence[Path], index_folder: Path | None = None) -> None:
        self._roots = roots
        self._index_folder = index_folder
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._looked = -LOOK_SECONDS
        self._indexes: dict[Run, RecordIndex] = {}
        self._asked: dict[Run, float] = {}
        self._first: dict[Run, threading.Event] = {}
        self._metrics: dict[Run, tuple[object, tuple[Metrics, list[str]]]] = {}
        self._stopped = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="viewer-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Follow no more; what is being read is read to its end, for two seconds at most."""
        self._stopped.set()
        self._wanted.set()
        self._thread.join(2.0)

    @property
    def runs(self) -> dict[str, Run]:
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self._runs, self._looked = find_runs(self._roots), time.monotonic()
            return self._runs

    def run(self, name: str) -> Run:
        """The run of this name. Raises UnknownRunError."""
        run = self.runs.get(name)
        if run is None:
            raise UnknownRunError(f"there is no run {name[:200]!r} below {', '.join(map(str, self._roots))}")
        return run

    def records(self, run: Run) -> Records:
        """What is known of a run's trajectories now; the first time, after a moment."""
        with self._lock:
            index = self._indexes.get(run)
            if index is None:
                index = self._indexes[run] = RecordIndex(run, self._index_folder)
                self._first[run] = threading.Event()
            self._asked[run] = time.monotonic()
        if not self._first[run].is_set():
            self._wanted.set()
        self._first[run].wait(FIRST_SECONDS)
        return index.records

    def read_all(self, run: Run) -> Records:
        """All of a run's trajectories, as soon as they are read; for who does not follow."""
        index = self._indexes.setdefault(run, RecordIndex(run, self._index_folder))
        index.refresh()
        self._first.setdefault(run, threading.Event()).set()
        return index.records

    def metrics(self, run: Run) -> Metrics:
        """All metrics of a run, empty if it has none. Values that are no finite or infinite floats are left out. Raises
        OSError if they cannot be read."""
        return self._read_metrics(run)[0]

    def metrics_problem(self, run: Run) -> str | None:
        """Which lines `metrics` leaves out; None if there are none. Raises OSError as it does."""
        problems = self._read_metrics(run)[1]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{problems[0]}{more}" if problems else None

    def _read_metrics(self, run: Run) -> tuple[Metrics, list[str]]:
        if not (run.folder / "metrics.jsonl").exists() or run.file is not None:
            return [], []
        state = tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in metrics_files(run.folder))
        known = self._metrics.get(run)
        if known is None or known[0] != state:
            problems: list[str] = []
            metrics = [(step, _numbers(data)) for step, data in read_metrics(run.folder, problems)]
            known = self._metrics[run] = (state, (metrics, problems))
        return known[1]

    def _follow(self) -> None:
        while not self._stopped.is_set():
            for run in self._selected_runs():
                try:
                    self._indexes[run].refresh()
                # The next run is still to be read, whatever this one holds.
                except Exception as error:  # noqa: BLE001
                    log.warning("cannot read the records of %s: %s", run.name, error)
                self._first[run].set()
            # A run that is asked for the first time does not wait.
            self._wanted.wait(LOOK_SECONDS)
            self._wanted.clear()

    def _selected_runs(self) -> list[Run]:
        now = time.monotonic()
        with self._lock:
            return [run for run, last in self._asked.items() if now - last < FORGET_SECONDS]


def _numbers(data: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in data.items() if isinstance(value, float) or _is_small_int(value)}


def _is_small_int(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63
