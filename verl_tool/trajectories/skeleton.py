"""What a document of another form has no place for: the record without the tokens, texts and log-probabilities in it.

It goes into the document's own place for further data, so that reading gives the very trajectory that was written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from verl_tool.agent_loop.trajectory import Trajectory

FIELD = "verl_tool"
"""Its name among the document's further data."""


@dataclass(frozen=True)
class Carried:
    """What stands in a document itself, by the numbers of segments."""

    last: int
    """Up to this segment it has all tokens; -1: none."""
    texts: Collection[int]
    log_probs: Collection[int]


def skeleton_of(trajectory: Trajectory, carried: Carried) -> dict[str, Any]:
    """The record with lengths in place of what is `carried`."""
    record: dict[str, Any] = json.loads(trajectory.to_json())
    for i, segment in enumerate(record["segments"]):
        if i <= carried.last:
            segment["tokens"] = len(segment["tokens"])
        if i in carried.texts:
            segment["text"] = len(segment["text"])
        if i in carried.log_probs:
            segment["log_probs"] = True
    return record


def restored(
    skeleton: Mapping[str, Any], tokens: Sequence[int], text: str, log_probs: Sequence[Sequence[float]]
) -> Trajectory | None:
    """The trajectory, of the document's tokens, its texts in a row and the log-probabilities of its turns.

    None if they are not those that were written: somebody changed the document.
    """
    record = json.loads(json.dumps(skeleton))
    rest_of_tokens, rest_of_text, rest_of_log_probs = list(tokens), text, [list(each) for each in log_probs]
    try:
        for segment in record["segments"]:
            if isinstance(n := segment["tokens"], int):
                segment["tokens"], rest_of_tokens = rest_of_tokens[:n], rest_of_tokens[n:]
                if len(segment["tokens"]) < n:
                    return None
            if isinstance(n := segment["text"], int):
                segment["text"], rest_of_text = rest_of_text[:n], rest_of_text[n:]
            if segment["log_probs"] is True:
                segment["log_probs"] = rest_of_log_probs.pop(0)
        trajectory = Trajectory.from_json(json.dumps(record))
    except (KeyError, TypeError, IndexError, ValidationError):
        return None
    return None if rest_of_tokens or rest_of_text or rest_of_log_probs else trajectory
