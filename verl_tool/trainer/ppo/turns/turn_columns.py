"""Pass turns and their rewards to advantage estimators, in both of verl's trainers.

An estimator with a parameter `turn_ids` or `turn_rewards` gets it, in addition to the arguments of verl:

- turn_ids: k on tokens of the model's k-th turn, from 1, and 0 on other tokens. int64 [batch, response_length]
- turn_rewards: the reward manager's reward for turn k in column k - 1, 0 if there is none. float64 [batch, turns],
  where turns is the maximum number of turns in a row

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from verl import DataProto
from verl_tool.agent_workers.reward_manager.base import TURN_REWARDS
from verl_tool.errors import ConfigError

TURN_IDS = "turn_ids"
Compute = Callable[..., DataProto]
_TRAINED = "train"
"""TransferQueue's partition of the training rows."""


def takes_turns(adv_estimator: str) -> bool:
    """Return whether the estimator takes turns."""
    return bool(_required(adv_estimator))


def takes_turn_rewards(adv_estimator: str) -> bool:
    """Return whether the estimator needs a reward manager that rewards turns."""
    return TURN_REWARDS in _required(adv_estimator)


def by_turns(data: DataProto, adv_estimator: str, config: Any) -> DataProto:
    """Add advantages and returns of an estimator that takes turns, which verl itself would not pass to it.

    Raises ConfigError if the estimator needs turn rewards and the reward manager gives none, and ValueError for
    malformed turn rewards.
    """
    requested = _required(adv_estimator)
    columns: dict[str, Any] = {}
    if TURN_IDS in requested:
        columns[TURN_IDS] = data.batch[TURN_IDS]
    if TURN_REWARDS in requested:
        column = data.non_tensor_batch.get(TURN_REWARDS)
        if column is None:
            raise ConfigError(missing_turn_rewards_message(adv_estimator))
        columns[TURN_REWARDS] = turn_rewards(column, data.batch[TURN_IDS].amax(dim=1).tolist())
    if "uid" in data.non_tensor_batch:
        columns["index"] = data.non_tensor_batch["uid"]
    data.batch["advantages"], data.batch["returns"] = get_adv_estimator_fn(adv_estimator)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        config=config,
        **columns,
    )
    return data


def missing_turn_rewards_message(adv_estimator: str) -> str:
    """Return the error message for a reward manager without turn rewards."""
    return (
        f"algorithm.adv_estimator={adv_estimator} needs a reward for each turn, and the reward manager gives none "
        f"(reward_extra_info[{TURN_REWARDS!r}]); take one that does, such as mt_torl, or search_r1_qa_em or search_f1 "
        "with reward.reward_kwargs.turn_rewards={}, or grpo"
    )


def turn_rewards(texts: Iterable[str], turns: Sequence[int]) -> torch.Tensor:
    """Convert lists of numbers in JSON to a tensor, with zeros at the right. float64 [rows, maximum of `turns`]

    `turns` are the numbers of turns of the rows. Raises ValueError, with the row's number, for a text that is not such
    a list, or has more numbers than the row has turns.
    """
    table = torch.zeros(len(turns), max(turns, default=0), dtype=torch.float64)
    for row, (text, maximum) in enumerate(zip(texts, turns, strict=True)):
        rewards = json.loads(text)
        if not isinstance(rewards, list) or not all(_is_reward(each) for each in rewards):
            raise ValueError(f"the turn rewards of row {row} are {text!r}; give a list of finite numbers")
        if len(rewards) > maximum:
            raise ValueError(f"row {row} has rewards for {len(rewards)} turns, and the model wrote {maximum} in it")
        table[row, : len(rewards)] = torch.tensor(rewards, dtype=torch.float64)
    return table


def with_turns(compute: Compute) -> Compute:
    """Wrap `compute_advantage_for_multi_trajectories` of verl's newer trainer to fetch the turns first.

    The rows are in TransferQueue, from which that trainer fetches only what verl's own estimators use.
    """

    def compute_advantage_for_multi_trajectories(
        data: DataProto, batch_keys: list[str], adv_estimator: str, **kwargs: Any
    ) -> DataProto:
        if takes_turns(adv_estimator):
            _fetch(data, batch_keys)
        return compute(data, batch_keys=batch_keys, adv_estimator=adv_estimator, **kwargs)

    return compute_advantage_for_multi_trajectories


def _fetch(data: DataProto, keys: list[str]) -> None:
    fields = tq.kv_batch_get(keys=keys, partition_id=_TRAINED, select_fields=[TURN_IDS, "extra_fields"])
    infos = [row.get("reward_extra_info", {}) for row in fields.pop("extra_fields").tolist()]
    data.batch[TURN_IDS] = fields.to_padded_tensor()[TURN_IDS]
    if all(TURN_REWARDS in info for info in infos):
        data.non_tensor_batch[TURN_REWARDS] = np.array([info[TURN_REWARDS] for info in infos], dtype=object)


def _required(adv_estimator: str) -> set[str]:
    return {TURN_IDS, TURN_REWARDS} & set(inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters)


def _is_reward(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
