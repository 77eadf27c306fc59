"""Rows as verl's agent loop sends them to a reward worker, and reward managers as the worker loads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager


class CodePoints:
    """A tokenizer whose ids are code points. 0 is its special token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in token_ids if i or not skip_special_tokens)


def config(name: str, **reward_kwargs: Any) -> Any:
    manager = {"source": "register", "name": name}
    return OmegaConf.create({"reward": {"reward_manager": manager, "reward_kwargs": reward_kwargs}})


def manager(name: str, **reward_kwargs: Any) -> GradingRewardManager[Any]:
    """Load a reward manager as verl's reward worker does."""
    return load_reward_manager(config(name, **reward_kwargs), CodePoints())


def trajectory(*pairs: tuple[str, str], **fields: Any) -> Trajectory:
    """Make a trajectory of segments (author, text)."""
    segments = (Segment(Author(author), tuple(map(ord, text))) for author, text in pairs)
    return Trajectory("t", (Segment(Author.PROMPT, (1,)), *segments), fields.pop("stop", StopReason.ANSWERED), **fields)


def data(of: Trajectory | None, ground_truth: Any, mask: list[int] | None = None, **row: Any) -> DataProto:
    """Make one row with the tensors and columns that verl's agent loop sends to a reward worker."""
    ids = of.response_ids if of is not None else row.pop("ids")
    tensors = {
        "prompts": torch.tensor([[1]]),
        "responses": torch.tensor([ids]),
        "attention_mask": torch.ones(1, 1 + len(ids), dtype=torch.long),
    }
    if mask is not None:
        tensors["response_mask"] = torch.tensor([mask])
    columns = {
        "data_source": "test",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": 0},
        "tool_extra_fields": {"trajectory": of} if of is not None else {},
        "__num_turns__": 2,
        **row,
    }
    as_arrays = {}
    for name, value in columns.items():
        as_arrays[name] = np.empty(1, dtype=object)
        as_arrays[name][0] = value
    return DataProto.from_dict(tensors=tensors, non_tensors=as_arrays)


async def scored(of_manager: GradingRewardManager[Any], answer: str, gold: Any, **row: Any) -> float:
    result = await of_manager.run_single(data(trajectory(("model", answer)), gold, **row))
    assert result["reward_extra_info"]["reward_fault"] == ""
    return result["reward_score"]
