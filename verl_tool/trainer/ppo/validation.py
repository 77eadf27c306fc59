"""Compute the means of a validation over the rows that were answered and graded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_tool.trainer.ppo.invalid import invalid_rows

Summary = Callable[[np.ndarray, list[str], dict[str, list[Any]], list[Any]], dict[str, Any]]
"""Type of verl's summary: ``(data_sources, uids, columns, turns) -> metrics``."""

INVALID = "val-agent/invalid"


def summarise_valid(
    summary: Summary,
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    reward_extra_infos_dict: Mapping[str, Sequence[Any]],
    sample_turns: list[Any],
) -> dict[str, Any]:
    """Return the `summary` of the valid rows, and the share of invalid ones. Without valid rows, return the share
    only."""
    invalid = invalid_rows(reward_extra_infos_dict, len(sample_uids))
    share = {INVALID: sum(invalid) / max(1, len(invalid))}
    if not any(invalid):
        return summary(np.array(data_sources), list(sample_uids), dict(reward_extra_infos_dict), sample_turns) | share  # type: ignore[arg-type]
    stored = [i for i, out in enumerate(invalid) if not out]
    if not stored:
        return share
    columns = {name: [column[i] for i in stored] for name, column in reward_extra_infos_dict.items() if len(column)}
    sources, uids = np.array([data_sources[i] for i in stored]), [sample_uids[i] for i in stored]
    return summary(sources, uids, columns, sample_turns) | share


def main_results_by_source(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the main result of a validation for each data source: verl's ``val-core/SOURCE/WHAT/mean@N``. A source may
    have slashes in its name, as ``openai/gsm8k``."""
    return {
        name.removeprefix("val-core/").rsplit("/", 2)[0]: float(value)
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/mean@" in name
    }
