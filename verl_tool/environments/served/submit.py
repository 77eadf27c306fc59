"""The tool that ends a row's episode, in protocols in which a policy only calls tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_tool.environments.served.episode import CallOutcome, EpisodeLostError, ServedEpisode

SUBMIT = "submit_answer"
ARGUMENT = "answer"
DESCRIPTION = {"name": SUBMIT, "description": "Ends the task with your final answer. Call it once."}
SCHEMA = {"type": "object", "properties": {ARGUMENT: {"type": "string", "description": "final answer"}}}


async def call_or_submit(episode: ServedEpisode, name: str, arguments: Mapping[str, Any]) -> CallOutcome:
    """Call a tool. In a row's episode, `SUBMIT` and a call that ends it give the row's reward.

    Raises EpisodeError if the call cannot be sent, EpisodeLostError if the infrastructure failed or nothing can be
    graded.
    """
    if episode.row is None:
        return await episode.call(name, arguments)
    if name != SUBMIT:
        outcome = await episode.call(name, arguments)
        return await _grade(episode, arguments.get(ARGUMENT), outcome) if outcome.done else outcome
    if set(arguments) - {ARGUMENT} or not isinstance(arguments.get(ARGUMENT, ""), str):
        return CallOutcome(f'call {SUBMIT} with {{"{ARGUMENT}": "your final answer"}}', True, "invalid_args")
    return await _grade(episode, arguments.get(ARGUMENT), CallOutcome("The episode has ended.", done=True))


async def _grade(episode: ServedEpisode, answer: object, outcome: CallOutcome) -> CallOutcome:
    """Return `outcome` with the reward of the row."""
    grade = await episode.grade([answer if isinstance(answer, str) else ""])
    if grade.reward is None:
        raise EpisodeLostError(f"there is no reward: {grade.failure}")
    return replace(outcome, reward=grade.reward, done=True)
