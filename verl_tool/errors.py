"""The project's exceptions. Each message says what was wrong, the limit, and what to do."""

from __future__ import annotations

from verl_tool.protocol import Fault, FaultKind


class VerlToolError(Exception):
    """Base of all errors that the project raises on purpose."""


class ConfigError(VerlToolError, ValueError):
    """An option is unknown, of a wrong type, or contradicts another."""


class StartError(VerlToolError):
    """A server could not start; the message says why and what to do."""


class IsolationError(VerlToolError):
    """This machine cannot give the isolation that was asked for."""


class ContentError(VerlToolError, ValueError):
    """An image or audio is broken, of a type that is not taken, too large, or one too many."""


class SandboxError(VerlToolError):
    """The sandbox itself failed; the code that it was given is not to blame."""

    def __init__(self, message: str, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether the code certainly did not run, so that running it again is safe."""


class LateError(SandboxError):
    """The sandbox did not copy, commit or check files in time. There may be too many of them."""


class ToolFault(VerlToolError):
    """Infrastructure failed on the way to an observation. Never shown to the model, never trained on."""

    def __init__(self, kind: FaultKind, message: str, retryable: bool, trajectory_id: str | None = None) -> None:
        super().__init__(f"{kind.value}: {message}")
        self.kind = kind
        self.message = message
        self.retryable = retryable
        """Whether the same step may be sent again without running anything twice."""
        self.trajectory_id = trajectory_id

    def as_fault(self) -> Fault:
        """The wire form."""
        return Fault(kind=self.kind, message=self.message, retryable=self.retryable)
