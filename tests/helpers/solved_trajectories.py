"""Trajectories for tests."""

from __future__ import annotations

from verl_tool.agent_loop.trajectory import Author, CallRecord, Excluded, Segment, StopReason, Timings, Trajectory
from verl_tool.protocol import Fault, FaultKind

REQUEST = "<request><SimpleCalculatorTool>1+1<call>"


def solved(name: str = "a") -> Trajectory:
    """Make one with one call and one answer."""
    segments = (
        Segment(Author.PROMPT, (1, 2)),
        Segment(Author.MODEL, (3, 4), (-0.1, -0.2), REQUEST),
        Segment(Author.TOOL, (5,), text="2<response>"),
        Segment(Author.MODEL, (6,), (-0.3,), "Result=2<submit>"),
    )
    calls = (
        CallRecord(0, REQUEST, "2<response>", visible_tokens=1, seconds=0.2, names=("SimpleCalculatorTool",)),
        CallRecord(1, "Result=2<submit>", done=True, seconds=0.1, names=("submit",)),
    )
    return Trajectory(name, segments, StopReason.TOOL_DONE, calls=calls, timings=Timings(1.0, 0.3, 1.4))


def faulted(name: str = "b") -> Trajectory:
    """Make one whose only call the server did not answer."""
    fault = Fault(kind=FaultKind.UNREACHABLE, message="nobody listens", retryable=True)
    segments = (Segment(Author.PROMPT, (1, 2)), Segment(Author.MODEL, (3, 4), (-0.1, -0.2), REQUEST))
    calls = (CallRecord(0, REQUEST, valid=False, fault=fault, seconds=2.0, names=("SimpleCalculatorTool",)),)
    return Trajectory(name, segments, StopReason.FAULT, calls=calls, fault=fault, excluded=Excluded.FAULT)
