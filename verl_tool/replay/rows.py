"""Which row of a data set a trajectory answers: that of its index, if the prompt holds its question."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval_service.evaluation.dataset import Problem
from verl_tool.agent_loop.trajectory import Trajectory


class Rows:
    """The rows of a data set, by their index and question."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._by_index: dict[int, list[Problem]] = defaultdict(list)
        for problem in problems:
            self._by_index[_index(problem)].append(problem)
        self._known: dict[tuple[int | None, str | None, str], Problem | None] = {}

    def of(self, trajectory: Trajectory) -> Problem | None:
        """The row of a training's trajectory. None if no row, or rows that differ, have its index and question, and its
        ``data_source`` if it tells one.

        The index is ``extra_info.index``, 0 where rows have none, as verl counts. A prompt that was cut, or whose text
        is not stored, has the only row of its index.
        """
        index = trajectory.extra.get("index")
        source = trajectory.extra.get("data_source")
        key = (None if index is None else int(index), source, _prompt(trajectory))
        if key not in self._known:
            candidates = self._problems if key[0] is None else self._by_index.get(key[0], [])
            fit = [row for row in candidates if source in (None, row.data_source) and _request(row, trajectory)]
            self._known[key] = _only(fit)
        return self._known[key]

    def at(self, position: int, trajectory: Trajectory | None) -> Problem | None:
        """The row at a position, from 0, if it is what the trajectory answers."""
        row = self._problems[position] if position < len(self._problems) else None
        return row if row is None or trajectory is None or _request(row, trajectory) else None


def _only(rows: Sequence[Problem]) -> Problem | None:
    """The first of `rows`, if they are all alike; of questions that hold one another the longest counts."""
    if not rows:
        return None
    longest = max(len(_question(row)) for row in rows)
    same = [row for row in rows if len(_question(row)) == longest]
    alike = all(row.digest == same[0].digest and row.data_source == same[0].data_source for row in same)
    return same[0] if alike else None


def _request(row: Problem, trajectory: Trajectory) -> bool:
    prompt = _prompt(trajectory)
    return not prompt or trajectory.prompt_truncated or _question(row) in prompt


def _prompt(trajectory: Trajectory) -> str:
    return _without_blanks("".join(segment.text for segment in trajectory.segments[: trajectory.prompt_segments]))


def _question(row: Problem) -> str:
    """The words of the last message: templates add to it, and may trim it."""
    content: Any = row.messages[-1].get("content") if row.messages else ""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    # Images between the words are tokens of their own in the prompt.
    return max((_without_blanks(text) for text in texts if isinstance(text, str)), key=len, default="")


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _index(problem: Problem) -> int:
    index = problem.extra_info.get("index")
    return int(index) if isinstance(index, int | float | str) and str(index).lstrip("-").isdigit() else 0
