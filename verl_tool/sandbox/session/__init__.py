"""Sessions: Python state, files and programs of one trajectory, for the duration of the trajectory."""

from verl_tool.sandbox.session.session import Session, SessionProcess

__all__ = ["Session", "SessionProcess"]
