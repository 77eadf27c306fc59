"""What a training tells while it runs, and how it is shown."""

from __future__ import annotations

import io
import time

import pytest
import ray
from rich.console import Console

from verl_tool.trainer.progress.progress import SET_UP_SECONDS, STARTED, VALIDATION_SECONDS, Progress
from verl_tool.trainer.progress.progress_bars import Bars, Lines, ProgressBars, display_for
from verl_tool.trainer.progress.progress_board import Phase, PhaseState, ProgressBoard

ROLLOUT = PhaseState(Phase.ROLLOUT, step=3, steps=10, expected=64, done=20, calls=30)


def test_a_board_counts_what_a_phase_expects():
    board = ProgressBoard()
    board.begin(PhaseState(Phase.ROLLOUT, 1, 2, expected=8))
    board.count(3, 6)
    board.expect(4)
    board.end(1.5, {"reward": 0.25})
    board.begin(PhaseState(Phase.UPDATE, 1, 2))
    board.count(5, 5)
    now, ended = board.read(0)
    assert now == PhaseState(Phase.UPDATE, 1, 2)
    assert ended == [PhaseState(Phase.ROLLOUT, 1, 2, 12, 3, 6, 1.5, {"reward": 0.25})]
    assert board.read(1) == (now, [])


def test_lines_tell_what_came_of_a_phase():
    console = Console(file=io.StringIO(), width=100)
    display = display_for(console)
    assert isinstance(display, Lines)
    display.show(ROLLOUT)
    display.ended(PhaseState(Phase.SET_UP, seconds=40.25))
    display.ended(PhaseState(Phase.ROLLOUT, 3, 10, 64, 64, 96, 4.0, {"reward": 0.5, "success": 0.4375, "calls": 1.5}))
    assert console.file.getvalue().splitlines() == [
        "set-up 40.2 s",
        "[step 3/10] rollout 4.0 s: reward 0.5, success 0.438, calls 1.5",
    ]


def test_bars_show_each_phase():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    bars = display_for(console)
    assert isinstance(bars, Bars)
    bars.start()
    bars.show(ROLLOUT)
    bars.ended(PhaseState(Phase.ROLLOUT, 3, 10, 64, 64, 96, 4.0, {"reward": 0.5}))
    bars.show(PhaseState(Phase.UPDATE, 3, 10))
    bars.ended(PhaseState(Phase.UPDATE, 3, 10, seconds=1.0))
    bars.show(PhaseState(Phase.VALIDATION, 3, 10, expected=16, done=4, calls=6))
    bars.stop()
    shown = console.file.getvalue().split("training")[-1]
    assert "3/10" in shown
    assert "64/64" in shown
    assert "4/16" in shown
    assert "1.5 calls" in shown
    assert "reward 0.5" in shown


class Shown:
    """A display that keeps what it was given."""

    def __init__(self) -> None:
        self.phases: list[PhaseState] = []
        self.now = PhaseState()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def show(self, now: PhaseState) -> None:
        self.now = now

    def ended(self, phase: PhaseState) -> None:
        self.phases.append(phase)


@pytest.mark.slow
def test_from_the_trainer_to_the_display(monkeypatch):
    """All in one process; the board is an actor as in a training."""
    monkeypatch.setenv(STARTED, str(time.time() - 100))
    shown = Shown()
    with ProgressBars(shown):
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        deadline = time.monotonic() + 60
        while (progress := Progress(stall_timeout=600))._board is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        progress.begin(Phase.VALIDATION, 0, 2, expected=16)
        assert progress.take_metrics()[SET_UP_SECONDS] >= 100
        progress.begin(Phase.ROLLOUT, 1, 2, expected=8)
        progress.expect(4)
        progress.tell({"reward": 0.5})
        progress.begin(Phase.UPDATE, 1, 2)
        progress.end()
    ray.shutdown()
    assert set(progress.take_metrics()) == {VALIDATION_SECONDS}
    assert [(p.phase, p.step, p.expected) for p in shown.phases] == [
        (Phase.SET_UP, 0, 0),
        (Phase.VALIDATION, 0, 16),
        (Phase.ROLLOUT, 1, 12),
        (Phase.UPDATE, 1, 0),
    ]
    assert shown.phases[2].results == {"reward": 0.5}
    assert shown.now.phase is Phase.UPDATE
