"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    ERROR = "error"
    """A training would learn nothing of its tools, or nothing at all. It is not begun."""
    WARNING = "warning"
    """A training may go on, and is likely to be worse for it."""
    NOTE = "note"
    """Good to know. A training does not tell it."""


@dataclass(frozen=True)
class Finding:
    check: str
    """Name of the check, such as ``check_tools_described``."""
    severity: Severity
    what: str
    """What is so, with the value and the limit."""
    remedy: str
    """What to set or to change; empty if nothing need be."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what
