"""`reward.reward_manager.name=by_source`: grade rows of several kinds in one training, each with its own manager.

    reward_kwargs:
      by: ability
      managers:
        math: {name: torl, kwargs: {shaping: {tool_cost: {weight: -0.05}}}}
        sql: {name: sqlcoder, kwargs: {root: /data/databases}}
        "nq*": {name: search_r1_qa_em}

A row's value of `by`, ``data_source`` or ``ability``, selects the first entry whose key it matches; ``*`` matches any
characters. ``kwargs`` are that manager's ``reward_kwargs``, including shaping. A custom manager needs a ``path`` in
addition to its ``name``. Logged values that a row's manager does not have are NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.reward import resolve_reward_manager_cls

from verl import DataProto
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, options_in, without_reward
from verl_tool.errors import ConfigError, VerlToolError


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Name of a manager of verl-tool, or of the class in the file `path`."""
    path: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)


class BySourceOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    by: Literal["data_source", "ability"] = "data_source"
    managers: dict[str, Entry] = Field(min_length=1)


@register("by_source")
class BySourceRewardManager(RewardManagerBase):
    """Passes each row to one of several managers."""

    Options: ClassVar[type[BySourceOptions]] = BySourceOptions

    def __init__(self, config: DictConfig, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError that names the entry whose manager cannot be created."""
        super().__init__(config, tokenizer, kwargs.get("compute_score"))
        self.options = options_in(config, self.Options, type(self).__name__)
        self._managers = {key: _create(config, tokenizer, key, entry) for key, entry in self.options.managers.items()}
        self._empty: dict[str, Any] = {}
        for manager in self._managers.values():
            self._empty |= manager.empty_extra_info()

    @property
    def partial_credit(self) -> bool:
        """Whether any of the managers gives partial credit."""
        return any(manager.partial_credit for manager in self._managers.values())

    @property
    def by_turns(self) -> bool:
        """Whether any of the managers rewards turns. Rows of the others have no turn rewards."""
        return any(manager.by_turns for manager in self._managers.values())

    @property
    def turn_weight(self) -> float:
        """The largest turn weight of the managers."""
        return max(manager.turn_weight for manager in self._managers.values())

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Grade the last row of `data` with its manager; see `GradingRewardManager`. All rows have the same keys."""
        row = data[-1].non_tensor_batch
        kind = str(row.get(self.options.by) or "")
        manager = next((each for key, each in self._managers.items() if fnmatchcase(kind, key)), None)
        if manager is None:
            known = ", ".join(self._managers)
            why = f"a row has {self.options.by} {kind!r}, which no entry of reward_kwargs.managers matches: {known}"
            return without_reward(why, self._empty)
        answer = await manager.run_single(data)
        return {**answer, "reward_extra_info": {**self._empty, **answer["reward_extra_info"]}}


def _create(config: DictConfig, tokenizer: Any, key: str, entry: Entry) -> GradingRewardManager[Any]:
    where = f"reward.reward_kwargs.managers.{key}"
    source: Mapping[str, Any] = {"source": "register", "name": entry.name}
    if entry.path is not None:
        source = {"source": "importlib", "name": entry.name, "module": {"path": entry.path}}
    whole = OmegaConf.to_container(config, resolve=True)
    assert isinstance(whole, dict)  # the mapping's own container
    whole["reward"] = {**whole["reward"], "reward_manager": source, "reward_kwargs": entry.kwargs}
    try:
        entry_config = OmegaConf.create(whole)
        manager_class = resolve_reward_manager_cls(entry_config)
        manager = manager_class(config=entry_config, tokenizer=tokenizer, compute_score=None)
    except VerlToolError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ValueError, AttributeError, OSError, ImportError) as error:
        raise ConfigError(f"{where}: {entry.name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(manager, GradingRewardManager):
        raise ConfigError(f"{where}: {entry.name!r} does not extend GradingRewardManager, and only such can be mixed")
    return manager
