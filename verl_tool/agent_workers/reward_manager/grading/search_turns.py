"""Rewards of single turns of a search: for a successful call, and for finding the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.trajectory import CallRecord
from verl_tool.agent_workers.reward_manager.grading.shaping import exchange, extract_calls, failed


class SearchTurns(BaseModel):
    """Rewards of a turn that calls a tool: the intermediate rewards of MT-GRPO (arXiv 2505.11821v2, E.2), and the
    search count penalty of MT-PPO (5.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    executed: float = Field(0.2, ge=0)
    """For a call that succeeded and does not repeat an earlier one."""
    found: float = Field(0.5, ge=0)
    """For the first call whose observation, as the server gave it, contains a golden answer that its query does not."""
    count_penalty: float = Field(0.0, ge=0)
    """Subtracted after multiplication by the number of the call, from 1. It is 0.1 in the paper's MT-PPO."""
    weight: float = Field(0.0, ge=0)
    """Weight of the sum over turns in the score. 1 gives the paper's merged reward, for GRPO. `mt_grpo` needs 0."""


def search_turn_rewards(
    calls: Sequence[CallRecord], contains_answer: Callable[[str], bool], options: SearchTurns
) -> tuple[float, ...]:
    """Return the reward of each of the model's calls, in their order.

    After the call that found the answer, success is not rewarded: otherwise, needless searches would pay more than
    answers. A call that ends the trajectory has reward 0.
    """
    rewards: list[float] = []
    exchanges: set[tuple[str, str]] = set()
    found = False
    for number, call in enumerate(calls, 1):
        reward = 0.0 if call.done else -options.count_penalty * number
        if (
            call.valid
            and call.fault is None
            and not call.done
            and not failed(call)
            and not found
            and exchange(call) not in exchanges
        ):
            found = contains_answer(call.observation)
            new = found and not contains_answer(extract_calls(call))
            reward += options.executed + (options.found if new else 0.0)
        exchanges.add(exchange(call))
        rewards.append(reward)
    return tuple(rewards)
