"""What the reward managers have in common: the model's own words are graded, within a deadline, and faults are told.

On verl's reward loop (`verl.experimental.reward_loop`). Options come from ``reward.reward_kwargs``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import aiohttp
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from verl.experimental.reward_loop.reward_manager.base import RawRewardFn, RewardManagerBase

from verl import DataProto
from verl_tool.agent_loop.trajectory import POLICY_INDUCED, RAISES_ON_EMPTY, REWARD_FAULT, ROW_REWARDS, Excluded
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.sample import Decoder, Sample, sample_of
from verl_tool.agent_workers.reward_manager.grading.shaping import Shaping
from verl_tool.errors import ConfigError

log = logging.getLogger(__name__)

TURN_REWARDS, TURN_REWARD = "turn_rewards", "turn_reward"
"""Keys of ``reward_extra_info``: rewards of single turns, as JSON, since verl makes an array of a batch's values; and
their sum."""
CURIOSITY, MIN_SHARE = "curiosity", "min_share"
"""Keys of ``reward_extra_info`` of managers that pay for what few of a group try: what it is worth (0 where this
trajectory did not), times how far the group's share of trajectories that did falls short of `MIN_SHARE`. The trainer
adds it (`trainer.ppo.curiosity`), since a group is known as a whole only there."""
PLACEHOLDER = 0.0
"""``reward_score`` of a row without reward, since verl's tensors need a number there."""
_FROM_OUTSIDE = (OSError, TimeoutError, asyncio.TimeoutError, aiohttp.ClientError)
"""What a server, a network or a disk makes a manager raise."""


class RewardOptions(BaseModel):
    """Options of every reward manager. One with options of its own extends this model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_seconds: float = Field(60.0, gt=0)
    """For grading one trajectory. Where comparisons wait for a place, from when there is one."""
    shaping: Shaping = Shaping()


class ScoreOptions(RewardOptions):
    """Options of a manager whose answers are right or wrong."""

    right: float = 1.0
    wrong: float = 0.0

    def score(self, right: bool) -> float:
        return self.right if right else self.wrong


OptionsT = TypeVar("OptionsT", bound=RewardOptions)
_Model = TypeVar("_Model", bound=BaseModel)


class GradingRewardManager(RewardManagerBase, Generic[OptionsT]):
    """One `grade` a trajectory, plus shaping.

    ``reward_extra_info`` has the same keys for every trajectory: ``acc`` (0 or 1), ``base_score``, ``reward_fault``,
    ``reward_provoked``, each of `details`, and ``shaping/<term>``; of a manager that rewards turns also
    ``turn_rewards``, a list in JSON, and ``turn_reward``, its sum; of one that rewards rows, ``row_rewards``, a list in
    JSON. Where there is no reward the numbers are NaN, and the lists are empty.
    """

    Options: ClassVar[type[RewardOptions]] = RewardOptions
    details: ClassVar[tuple[str, ...]] = ()
    """Names of all that `Grade.details` may hold."""
    partial_credit: bool = False
    """Whether an answer that is not right may score above a wrong one, as a share of the right one's score."""
    by_rows: ClassVar[bool] = False
    """Whether it rewards training rows: `Grade.row_rewards` is added to the score, each on its own row."""
    keeps_deadlines: ClassVar[bool] = False
    """The grader keeps the deadline of `grade` itself: samples wait for places in it, and the answers before this one
    must not use up its time."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Decoder,
        compute_score: RawRewardFn = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Decoder | None = None,
    ) -> None:
        """The last three are verl's, and without use here. Raises ConfigError if an option is unknown or wrong."""
        super().__init__(config, tokenizer, compute_score)
        self.options: OptionsT = options_in(config, self.Options, type(self).__name__)  # type: ignore[assignment]

    @property
    def by_turns(self) -> bool:
        """Whether it rewards turns: `Grade.turn_rewards` is told."""
        return False

    @property
    def turn_weight(self) -> float:
        """Of the sum of the turns' rewards in the score. An estimator that takes turn rewards needs 0, or they count
        twice."""
        return 0.0

    @abstractmethod
    async def grade(self, sample: Sample) -> Grade:
        """Grade one trajectory. Raises GraderFault if the grader fails."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """verl's entry point: ``{"reward_score": float, "reward_extra_info": {...}}`` of the last row of `data`."""
        item = data[-1]
        sample = sample_of(item.non_tensor_batch, item.batch, self.tokenizer)
        fault = sample.trajectory.fault
        extra = self.empty_extra_info()
        if fault is not None and (sample.trajectory.excluded is Excluded.FAULT or not fault.kind.provokable):
            return without_reward(f"trajectory: {fault.kind.value}", extra)
        try:
            grade, policy_induced = await self._grade_or_control(sample)
            return self._with_reward(grade, self.options.shaping.values(sample), policy_induced)
        except GraderFault as error:
            return without_reward(self._failure(error), extra)
        except Exception as error:  # a bug of the grader: neither the score 0 nor the end of the training
            log.exception("%s crashed on trajectory %s", type(self).__name__, sample.trajectory.trajectory_id)
            bug = "" if _is_from_outside(error) else f" ({RAISES_ON_EMPTY})"
            return without_reward(f"{self._failure(error)}{bug}", extra)

    async def _grade_or_control(self, sample: Sample) -> tuple[Grade, str]:
        """The grade, or that of an empty answer with how grading this one failed.

        A grader that fails at an empty answer too is broken, and what it raises then is raised.
        """
        try:
            return await self._graded(sample), ""
        except GraderFault:
            raise
        except Exception as error:  # anything that this answer may bring about
            log.exception("%s crashed on trajectory %s", type(self).__name__, sample.trajectory.trajectory_id)
            return await self._graded(replace(sample, turns=("",))), self._failure(error)

    async def _graded(self, sample: Sample) -> Grade:
        seconds = None if self.keeps_deadlines else self.options.timeout_seconds
        grade = await asyncio.wait_for(self.grade(sample), seconds)
        rows = len(sample.trajectory.rows)
        if self.by_rows and len(grade.row_rewards) not in (0, rows):
            raise GraderFault(f"{len(grade.row_rewards)} rewards of rows, and the rollout has {rows} rows")
        return grade

    def _failure(self, error: Exception) -> str:
        name = type(self).__name__
        if isinstance(error, asyncio.TimeoutError):
            return f"grader: {name}: no end within {self.options.timeout_seconds:g} s"
        return f"grader: {name}: {error if isinstance(error, GraderFault) else f'{type(error).__name__}: {error}'}"

    def _with_reward(self, grade: Grade, shaping: dict[str, float], provoked: str) -> dict[str, Any]:
        extra = {
            REWARD_FAULT: "",
            POLICY_INDUCED: provoked,
            "acc": float(grade.correct),
            "base_score": grade.score,
        }
        extra |= {name: float(grade.details.get(name, math.nan)) for name in self.details}
        extra |= {f"shaping/{name}": value for name, value in shaping.items()}
        score = grade.score + sum(shaping.values())
        if self.by_turns:
            total = sum(grade.turn_rewards, 0.0)
            extra |= {TURN_REWARDS: json.dumps(grade.turn_rewards), TURN_REWARD: total}
            score += self.turn_weight * total
        if self.by_rows:
            extra[ROW_REWARDS] = json.dumps(grade.row_rewards)
            score += sum(grade.row_rewards)
        return {"reward_score": score, "reward_extra_info": extra}

    def empty_extra_info(self) -> dict[str, Any]:
        """What ``reward_extra_info`` holds besides faults where there is no reward: the same keys as where there is."""
        terms = (f"shaping/{name}" for name in self.options.shaping.terms())
        extra: dict[str, Any] = dict.fromkeys(("acc", "base_score", *self.details, *terms), math.nan)
        if self.by_turns:
            extra |= {TURN_REWARDS: "[]", TURN_REWARD: math.nan}
        return extra | {ROW_REWARDS: "[]"} if self.by_rows else extra


def _is_from_outside(error: BaseException) -> bool:
    """Whether `error`, or one that led to it, is no bug of the manager: its judge or its server did not answer."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return any(isinstance(each, _FROM_OUTSIDE) for each in chain)


def without_reward(why: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `run_single` where grading failed; `told`: what else its ``reward_extra_info`` holds."""
    log.warning("no reward: %s", why)
    return {"reward_score": PLACEHOLDER, "reward_extra_info": {REWARD_FAULT: why, POLICY_INDUCED: "", **told}}


def options_in(config: DictConfig, kind: type[_Model], manager: str) -> _Model:
    """``reward.reward_kwargs`` as `kind`. Raises ConfigError that names the option and those that `manager` has."""
    # In its place, where it may refer to other parts of the config.
    kwargs = config.reward.get("reward_kwargs") or {}
    options = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else kwargs
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(["reward.reward_kwargs", *map(str, problem["loc"])])
        known = ", ".join(sorted(kind.model_fields))
        raise ConfigError(f"{where}: {problem['msg']}; known options of {manager}: {known}") from None
