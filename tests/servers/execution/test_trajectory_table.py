"""The table of trajectories against a simple model, under any order of events."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.trajectory_table import ServedTrajectory, TrajectoryTable

TTL = 100.0
MOST = 4
IDS = st.sampled_from("abcdefg")


class TableMachine(RuleBasedStateMachine):
    """A stateful set's table. The model knows which ids have a state, and when they were last used."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.last_used: dict[str, float] = {}
        self.lost: dict[str, float] = {}
        """Until when each is remembered as lost."""
        self.answers: dict[tuple[str, int], StepResult] = {}
        self.next_step: dict[str, int] = {}
        self.removed: list[str] = []
        self.table = TrajectoryTable(
            stateful=True,
            state_ttl_seconds=TTL,
            record_ttl_seconds=TTL,
            max_trajectories=MOST,
            max_record_bytes=3000,
            records_per_trajectory=2,
            on_removed=self._removed,
            clock=lambda: self.now,
        )

    def _removed(self, trajectory: ServedTrajectory) -> None:
        self.removed.append(trajectory.id)
        self.last_used.pop(trajectory.id)
        self.next_step.pop(trajectory.id, None)
        if self.table.knows(trajectory.id):
            self.lost[trajectory.id] = self.now + TTL

    def _enter(self, request: StepRequest) -> ServedTrajectory | FaultKind:
        try:
            trajectory = self.table.enter(request)
        except ToolFault as fault:
            return fault.kind
        self.last_used[trajectory.id] = self.now
        trajectory.states.setdefault("tool", object())
        return trajectory

    @rule(trajectory_id=IDS)
    def step(self, trajectory_id: str) -> None:
        """The next step: it is taken if the trajectory is known, or new and at step 0; never with fresh state."""
        step = self.next_step.get(trajectory_id, 0)
        request = StepRequest(trajectory_id, f"action {step}", step)
        was_lost = self.lost.get(trajectory_id, -1.0) >= self.now
        entered = self._enter(request)
        if was_lost:
            assert entered is FaultKind.STATE_LOST
            return
        if not isinstance(entered, ServedTrajectory):
            assert entered is FaultKind.STATE_LOST
            assert trajectory_id in self.lost  # it expired at this very access
            return
        record = self.table.open_record(entered, request)
        result = StepResult(trajectory_id, f"answer {step}")
        self.table.close_record(entered, step, record, result)
        self.table.leave(entered)
        self.answers[trajectory_id, step] = result
        self.next_step[trajectory_id] = step + 1

    @rule(trajectory_id=IDS)
    def repeat(self, trajectory_id: str) -> None:
        """The last step again: its own answer or a fault, never a new run."""
        step = self.next_step.get(trajectory_id, 0) - 1
        if step < 0:
            return
        entered = self._enter(StepRequest(trajectory_id, f"action {step}", step))
        if not isinstance(entered, ServedTrajectory):
            assert entered is FaultKind.STATE_LOST
            return
        # A fault here: the record is forgotten, for the bound on bytes or by its age.
        with suppress(ToolFault):
            record = self.table.open_record(entered, StepRequest(trajectory_id, f"action {step}", step))
            assert record.result == self.answers[trajectory_id, step]
        self.table.leave(entered)

    @rule(trajectory_id=IDS, step=st.integers(1, 5))
    def stranger(self, trajectory_id: str, step: int) -> None:
        """An unknown trajectory beyond step 0 is refused."""
        if trajectory_id not in self.last_used:
            assert self._enter(StepRequest(trajectory_id, "x", step)) is FaultKind.STATE_LOST

    @rule(trajectory_id=IDS)
    def finish(self, trajectory_id: str) -> None:
        """Afterwards the id is free for a new trajectory."""
        self.table.forget_lost(trajectory_id)
        self.lost.pop(trajectory_id, None)
        trajectory = self.table.get(trajectory_id)
        if trajectory is not None:
            trajectory.states.clear()
            self.table.remove(trajectory)

    @rule(seconds=st.floats(0, TTL))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.sweep()
        for used in self.last_used.values():
            assert self.now - used < TTL

    @rule()
    def wait_very_long(self) -> None:
        """Everything is forgotten in the end, what was lost too."""
        for _ in range(3):
            self.now += TTL + 1
            self.table.sweep()
        self.lost.clear()
        assert len(self.table) == 0
        assert self.table.record_bytes == 0

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.table) <= MOST
        assert sorted(self.table.ids()) == sorted(self.last_used)
        assert self.table.record_bytes <= 3000


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=30)
