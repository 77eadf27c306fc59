"""Find the row of a data set that a trajectory answers: it has its index, and its question is in the prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval_service.evaluation.dataset import Problem
from verl_tool.agent_loop.trajectory import Trajectory


class Rows:
    """Rows of a data set, by index and question."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._by_index: dict[int, list[Problem]] = defaultdict(list)
        for problem in problems:
            self._by_index[_index(problem)].append(problem)
        self._matches: dict[tuple[int | None, str | None, str], Problem | None] = {}

    def match(self, trajectory: Trajectory) -> Problem | None:
        """Return the row of a training's trajectory: the one with its index, its question and, if the record has one,
        its ``data_source``. None if no row or several different rows match.

        The index is ``extra_info.index``, 0 if a row has none, as in verl. If the prompt was truncated or its text is
        not stored, the index must be unique.
        """
        index = trajectory.extra.get("index")
        source = trajectory.extra.get("data_source")
        key = (None if index is None else int(index), source, _prompt(trajectory))
        if key not in self._matches:
            candidates = self._problems if key[0] is None else self._by_index.get(key[0], [])
            found = [row for row in candidates if source in (None, row.data_source) and _has_question(trajectory, row)]
            self._matches[key] = _select_unique(found)
        return self._matches[key]

    def get(self, position: int, trajectory: Trajectory | None) -> Problem | None:
        """Return the row at a position, from 0, unless the trajectory answers a different question."""
        row = self._problems[position] if position < len(self._problems) else None
        return row if row is None or trajectory is None or _has_question(trajectory, row) else None


def _select_unique(rows: Sequence[Problem]) -> Problem | None:
    """Return the row with the longest question, since questions may contain each other. None if several such differ."""
    if not rows:
        return None
    longest = max(len(_question(row)) for row in rows)
    same = [row for row in rows if len(_question(row)) == longest]
    equal = all(row.digest == same[0].digest and row.data_source == same[0].data_source for row in same)
    return same[0] if equal else None


def _has_question(trajectory: Trajectory, row: Problem) -> bool:
    prompt = _prompt(trajectory)
    return not prompt or trajectory.prompt_truncated or _question(row) in prompt


def _prompt(trajectory: Trajectory) -> str:
    return _remove_spaces("".join(segment.text for segment in trajectory.segments[: trajectory.prompt_segments]))


def _question(row: Problem) -> str:
    """Return the longest text of the last message without spaces, since templates add to a message and may trim it."""
    content: Any = row.messages[-1].get("content") if row.messages else ""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    # Images between texts are separate tokens in the prompt.
    return max((_remove_spaces(text) for text in texts if isinstance(text, str)), key=len, default="")


def _remove_spaces(text: str) -> str:
    return "".join(text.split())


def _index(problem: Problem) -> int:
    index = problem.extra_info.get("index")
    return int(index) if isinstance(index, int | float | str) and str(index).lstrip("-").isdigit() else 0
