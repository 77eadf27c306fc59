"""Scores answers as training does: by verl's reward managers, ours and one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.reward import load_reward_manager

from eval_service.evaluation.dataset import Problem
from eval_service.evaluation.record import Record, any_of
from verl import DataProto
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.errors import ConfigError


class ScoringTokenizer(Protocol):
    """What reward managers need of a tokenizer, and what puts an answer's text before them."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class TextTokenizer:
    """Its tokens are the bytes of UTF-8: for answers of which only the text is known."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def reward_config(name: str, options: dict[str, Any], tool_server_url: str | None = None) -> DictConfig:
    """The part of a trainer's config by which verl makes the reward manager `name` with its `options`."""
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"agent": {"tool_server_url": tool_server_url}},
            "reward": {
                "reward_manager": {"source": "register", "name": name, "module": None},
                "custom_reward_function": {"path": None, "name": None},
                "reward_kwargs": options,
            },
        }
    )


def reward_of_run(
    config: DictConfig, name: str | None, options: dict[str, Any], tool_server_url: str | None = None
) -> DictConfig:
    """The reward by which a run was trained, with `options` over the run's own.

    A reward manager `name` that is not the run's has no options but `options`. It runs code on `tool_server_url`; else
    on the server that the run was told, but not on one that the run started itself: that one ended with it.
    """
    agent = config.actor_rollout_ref.agent
    url = tool_server_url
    if url is None and config.tool_server.start is None:
        url = agent.tool_server_url or agent.tool_config.server_url
    if name is not None and name != config.reward.reward_manager.name:
        return reward_config(name, options, url)
    reward = OmegaConf.to_container(config.reward, resolve=True)
    assert isinstance(reward, dict)  # the mapping's own container
    own = dict(reward.get("reward_kwargs") or {})
    if tool_server_url is not None:
        own.pop("server_url", None)
    whole = OmegaConf.to_container(config, resolve=True)
    assert isinstance(whole, dict)
    whole["reward"] = {**reward, "reward_kwargs": OmegaConf.merge(own, options)}
    whole["actor_rollout_ref"]["agent"]["tool_server_url"] = url
    return OmegaConf.create(whole)


class Scorer:
    """A reward manager and the tokenizer that it reads answers with.

    Without `tokenizer` the texts of the record are scored, special tokens and all.
    """

    def __init__(self, config: DictConfig, tokenizer: ScoringTokenizer | None = None) -> None:
        """Raises ConfigError if verl does not know the reward manager."""
        self._tokenizer = tokenizer
        self._texts = TextTokenizer()
        try:
            self._manager = load_reward_manager(config, tokenizer or self._texts)
        except (ValueError, FileNotFoundError, AttributeError, RuntimeError) as error:
            raise ConfigError(f"the reward manager cannot be made: {error}") from error

    async def score(self, record: Record, problem: Problem) -> Record:
        """The record with its score, or with the reason why there is none."""
        result = await self._manager.run_single(self._batch(record, problem))
        details = dict(result.get("reward_extra_info") or {})
        fault = details.pop("reward_fault", "")
        if fault:
            return Record(**(vars(record) | {"reward_fault": str(fault)}))
        score = float(result["reward_score"])
        return record.with_score(score, float(details.get("acc", score)) > 0.5, any_of(details))

    async def score_all(
        self, records: Sequence[Record], problems: Sequence[Problem], at_a_time: int = 16
    ) -> list[Record]:
        """All of them, in their order; those without an answer stay as they are."""
        places = asyncio.Semaphore(at_a_time)

        async def one(record: Record) -> Record:
            if record.error is not None:
                return record
            async with places:
                return await self.score(record, problems[record.index])

        return list(await asyncio.gather(*(one(record) for record in records)))

    def _batch(self, record: Record, problem: Problem) -> DataProto:
        """One row as verl's reward loop gets it."""
        trajectory = self._readable(record)
        ids = trajectory.response_ids or [0]
        tensors = {
            "prompts": torch.zeros(1, 1, dtype=torch.long),
            "responses": torch.tensor([ids]),
            "response_mask": torch.tensor([trajectory.response_mask or [0]]),
            "attention_mask": torch.ones(1, 1 + len(ids), dtype=torch.long),
        }
        row = {
            "data_source": problem.data_source,
            "reward_model": dict(problem.reward_model),
            "extra_info": dict(problem.extra_info),
            "ability": problem.ability,
            "tool_extra_fields": {"trajectory": trajectory},
            "__num_turns__": trajectory.num_turns,
        }
        columns = {name: _column(value) for name, value in row.items()}
        return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=columns)

    def _readable(self, record: Record) -> Trajectory:
        """The trajectory in tokens of the tokenizer at hand."""
        trajectory = record.trajectory
        if trajectory is not None and self._tokenizer is not None:
            return trajectory
        if trajectory is None:
            ids = (self._tokenizer or self._texts).encode(record.content, add_special_tokens=False)
            prompt, answer = Segment(Author.PROMPT, ()), Segment(Author.MODEL, tuple(ids), text=record.content)
            return Trajectory(f"{record.index}-{record.sample}", (prompt, answer), StopReason.ANSWERED)
        segments = tuple(
            Segment(segment.author, tuple(self._texts.encode(segment.text)), text=segment.text)
            for segment in trajectory.segments
        )
        return Trajectory(
            trajectory.trajectory_id,
            segments,
            trajectory.stop,
            prompt_segments=trajectory.prompt_segments,
            calls=trajectory.calls,
            verdict=trajectory.verdict,
        )


def _column(value: object) -> np.ndarray:
    column = np.empty(1, dtype=object)
    column[0] = value
    return column
