"""What a training tells while it runs, and how it is shown."""

from __future__ import annotations

import io
import time

import pytest
import ray
from rich.console import Console

from verl_tool.trainer.progress.progress import SET_UP_SECONDS, STARTED, SUCCESS_METRIC, VALIDATION_SECONDS, Progress
from verl_tool.trainer.progress.progress_bars import Bars, Lines, ProgressBars, display_for
from verl_tool.trainer.progress.progress_board import Event, Phase, PhaseState, ProgressBoard
from verl_tool.trainer.progress.step_table import StepRow, StepTable

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
    display.happened(PhaseState(Phase.SET_UP, seconds=40.25))
    display.happened(PhaseState(Phase.ROLLOUT, 3, 10, 64, 64, 96, 4.0, {"reward": 0.5}))
    display.happened(StepRow(3, {"reward": 0.5}))
    display.happened(PhaseState(Phase.VALIDATION, 3, 10, 16, 16, 16, 2.0, {"calculator": 0.4375}))
    display.happened("step 3: actor/ppo_kl is 0.3")
    assert console.file.getvalue().splitlines() == [
        "set-up 40.2 s",
        *StepTable().lines(StepRow(3, {"reward": 0.5}), 10),
        "validation of step 3 2.0 s: calculator 0.438",
        "warning: step 3: actor/ppo_kl is 0.3",
    ]


def test_bars_show_each_phase():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    bars = display_for(console)
    assert isinstance(bars, Bars)
    bars.start()
    bars.show(ROLLOUT)
    bars.happened(PhaseState(Phase.ROLLOUT, 3, 10, 64, 64, 96, 4.0, {"reward": 0.5}))
    bars.show(PhaseState(Phase.UPDATE, 3, 10))
    bars.happened(PhaseState(Phase.UPDATE, 3, 10, seconds=1.0))
    bars.happened(StepRow(3, {"reward": 0.125}))
    bars.show(PhaseState(Phase.VALIDATION, 3, 10, expected=16, done=4, calls=6))
    bars.stop()
    shown = console.file.getvalue().split("training")[-1]
    assert "3/10" in shown
    assert "64/64" in shown
    assert "4/16" in shown
    assert "1.5 calls" in shown
    assert "reward 0.5" in shown
    assert "0.125" in console.file.getvalue()


class Shown:
    """A display that keeps what it was given."""

    def __init__(self) -> None:
        self.phases: list[PhaseState] = []
        self.others: list[Event] = []
        self.now = PhaseState()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def show(self, now: PhaseState) -> None:
        self.now = now

    def happened(self, event: Event) -> None:
        if isinstance(event, PhaseState):
            self.phases.append(event)
        else:
            self.others.append(event)


@pytest.mark.alone
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
        progress.tell({"reward": 0.5, "success": 0.25})
        progress.begin(Phase.UPDATE, 1, 2)
        ray.get(progress._board.tell.remote([StepRow(1, {"reward": 0.5}), "warned"]))
        progress.end()
    ray.shutdown()
    metrics = progress.take_metrics()
    assert set(metrics) == {VALIDATION_SECONDS, SUCCESS_METRIC}
    assert metrics[SUCCESS_METRIC] == 0.25
    assert shown.others == [StepRow(1, {"reward": 0.5}), "warned"]
    assert [(p.phase, p.step, p.expected) for p in shown.phases] == [
        (Phase.SET_UP, 0, 0),
        (Phase.VALIDATION, 0, 16),
        (Phase.ROLLOUT, 1, 12),
        (Phase.UPDATE, 1, 0),
    ]
    assert shown.phases[2].results == {"reward": 0.5, "success": 0.25}
    assert shown.now.phase is Phase.UPDATE
