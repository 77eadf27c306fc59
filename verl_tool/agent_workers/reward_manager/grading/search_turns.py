"""Rewards of single turns of a search: the call succeeded, and what it found holds the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.trajectory import CallRecord
from verl_tool.agent_workers.reward_manager.grading.shaping import exchange, extract_calls, failed


class SearchTurns(BaseModel):
    """What a turn that calls a tool is rewarded with: the intermediate rewards of MT-GRPO (arXiv 2505.11821v2, E.2),
    and the search count penalty of MT-PPO (5.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    executed: float = Field(0.2, ge=0)
    """The call succeeded, and is no repetition of an earlier one."""
    found: float = Field(0.5, ge=0)
    """Its observation, as the server gave it, is the first that holds a golden answer, which its query does not."""
    count_penalty: float = Field(0.0, ge=0)
    """Taken off, times the number of the call from 1 on: 0.1, as in the paper's MT-PPO, is 0.1 for the first."""
    weight: float = Field(0.0, ge=0)
    """Of the turns' sum in the score. 1 is the paper's merged reward, for GRPO; `mt_grpo` needs 0."""


def search_turn_rewards(
    calls: Sequence[CallRecord], contains_answer: Callable[[str], bool], options: SearchTurns
) -> tuple[float, ...]:
    """One for each of the model's calls, in their order.

    Behind the call that found the answer, further calls get nothing for success: rewarded each time, searches for their
    own sake would pay more than answers. A call that ends the trajectory gets nothing at all.
    """
    rewards: list[float] = []
    exchanges: set[tuple[str, str]] = set()
    there = False
    for number, call in enumerate(calls, 1):
        reward = 0.0 if call.done else -options.count_penalty * number
        if (
            call.valid
            and call.fault is None
            and not call.done
            and not failed(call)
            and not there
            and exchange(call) not in exchanges
        ):
            there = contains_answer(call.observation)
            new = there and not contains_answer(extract_calls(call))
            reward += options.executed + (options.found if new else 0.0)
        exchanges.add(exchange(call))
        rewards.append(reward)
    return tuple(rewards)
