"""What pydantic found wrong with the arguments of a call, in words for the model and of a bounded length."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from verl_tool.util.json_text import excerpt

MAX_REPORTED = 5
"""Errors that are told; of more, their number."""
_WORDS = {"extra_forbidden": "there is no such argument"}
_SCALAR = (str, int, float, bool)


def errors_of(error: ValidationError) -> list[ErrorDetails]:
    """All that is wrong, without what nobody is told."""
    return error.errors(include_url=False, include_context=False)


def describe_problems(errors: Sequence[ErrorDetails]) -> str:
    """Each value that is wrong, where it stands and why; of many, the first ones and their number."""
    more = [f"and {len(errors) - MAX_REPORTED} more"] if len(errors) > MAX_REPORTED else []
    return "; ".join([*map(_describe, errors[:MAX_REPORTED]), *more])


def _describe(error: ErrorDetails) -> str:
    where, why, value = _where(error["loc"]), _WORDS.get(error["type"], error["msg"][:200]), error["input"]
    of_a_value = error["type"] not in ("missing", *_WORDS) and isinstance(value, _SCALAR)
    return f"{where}: {why}{f', not {excerpt(value, 40)}' if of_a_value else ''}"


def _where(places: Sequence[int | str]) -> str:
    """Such as ``points.3.x``; a name that a model made up is quoted if it is long or not printable."""
    parts = [str(place) for place in places[:8]]
    return ".".join(part if len(part) <= 60 and part.isprintable() else excerpt(part, 60) for part in parts) or "it"
