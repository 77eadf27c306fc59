"""A training on the console: a line a step, and on a terminal a bar for each phase below them."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typing_extensions import Self

from verl_tool.trainer.progress.progress_board import Event, Phase, PhaseState, make_board
from verl_tool.trainer.progress.step_table import StepRow, StepTable

SECONDS_BETWEEN_LOOKS = 0.5
ANSWER_SECONDS = 5.0
"""The board has this long to answer."""


class Display(Protocol):
    """Something that shows how far a training is."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def show(self, now: PhaseState) -> None:
        """The phase under way."""
        ...

    def happened(self, event: Event) -> None:
        """A phase that is over, a step's numbers or a warning. Each is told once, in order."""
        ...


class Lines:
    """A line for each step, validation and warning."""

    def __init__(self, console: Console) -> None:
        self._console, self._table, self._steps = console, StepTable(), 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def show(self, now: PhaseState) -> None: ...

    def happened(self, event: Event) -> None:
        if isinstance(event, StepRow):
            for line in self._table.lines(event, self._steps):
                self._print(line)
        elif isinstance(event, str):
            self._print(f"warning: {event}", style="yellow")
        else:
            self._steps = event.steps
            if event.phase in (Phase.SET_UP, Phase.VALIDATION):
                self._print(_final_line(event))

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _final_line(phase: PhaseState) -> str:
    where = f" of step {phase.step}" if phase.step else ""
    description = f": {describe_results(phase)}" if phase.results else ""
    return f"{phase.phase.value}{where} {phase.seconds:.1f} s{description}"


class Bars:
    """The whole training, and below it each phase as it was last or is now."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[told]}"), console=console)
        self._training = self._progress.add_task("training", total=None, told="setting up")
        self._tasks = {
            phase: self._progress.add_task(phase.value, start=False, visible=False, total=None, told="")
            for phase in (Phase.ROLLOUT, Phase.UPDATE, Phase.VALIDATION)
        }
        self._shown: tuple[Phase, int] | None = None
        self._lines = Lines(self._progress.console)

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def show(self, now: PhaseState) -> None:
        task = self._tasks.get(now.phase)
        if task is None:
            return
        if self._shown != (now.phase, now.step):
            self._shown = (now.phase, now.step)
            self._progress.reset(task, visible=True, total=now.expected or None)
            finished = now.step if now.phase is Phase.VALIDATION else now.step - 1
            self._progress.update(self._training, total=now.steps, completed=max(0, finished))
        if now.expected:
            calls = f"{now.calls / now.done:.1f} calls" if now.done else ""
            self._progress.update(task, completed=min(now.done, now.expected), total=now.expected, told=calls)

    def happened(self, event: Event) -> None:
        self._lines.happened(event)
        if isinstance(event, PhaseState) and event.phase in self._tasks:
            self._finish(event, self._tasks[event.phase])

    def _finish(self, phase: PhaseState, task: TaskID) -> None:
        total = phase.expected or 1
        self._progress.update(task, visible=True, total=total, completed=total, told=describe_results(phase))
        self._stop_clock(task)
        if phase.phase is Phase.ROLLOUT:
            self._progress.update(self._training, told=describe_results(phase))
        elif phase.phase is Phase.UPDATE:
            self._progress.update(self._training, completed=phase.step)

    def _stop_clock(self, task: TaskID) -> None:
        self._progress.start_task(task)
        self._progress.stop_task(task)


def describe_results(phase: PhaseState) -> str:
    """What came of a phase, in words."""
    return ", ".join(f"{name} {value:.3g}" for name, value in phase.results.items())


def display_for(console: Console) -> Display:
    """Bars on a terminal, lines elsewhere."""
    return Bars(console) if console.is_terminal else Lines(console)


class ProgressBars:
    """Follows the training that runs inside the ``with`` block, once it has started Ray."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._stop = threading.Event()
        self._seen = 0
        self._board: Any | None = None
        self._thread = threading.Thread(target=self._follow, name="progress-bars", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._board = None

    def _follow(self) -> None:
        self._display.start()
        try:
            while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
                self._look()
            self._look()
        except RayError:  # the cluster is gone; the command line tells why
            pass
        finally:
            self._display.stop()

    def _look(self) -> None:
        if not ray.is_initialized():
            return
        if self._board is None:
            self._board = make_board()
        try:
            now, events = ray.get(self._board.read.remote(self._seen), timeout=ANSWER_SECONDS)
        except GetTimeoutError:  # a busy machine; the next look shows it all
            return
        self._seen += len(events)
        for event in events:
            self._display.happened(event)
        self._display.show(now)
