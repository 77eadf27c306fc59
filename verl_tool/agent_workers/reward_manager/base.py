"""The base class of reward managers: it grades the model's text within a deadline, and reports faults.

Reward managers run in verl's reward loop (`verl.experimental.reward_loop`). Options come from ``reward.reward_kwargs``.
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
"""Keys of ``reward_extra_info``: the rewards of single turns, as JSON because verl makes arrays of a batch's values,
and their sum."""
CURIOSITY, MIN_SHARE = "curiosity", "min_share"
"""Keys of ``reward_extra_info`` of managers that reward what few of a group try: the weight of the bonus (0 if this
trajectory did not try), and the share of the group from which on there is no bonus. The trainer adds the bonus
(`trainer.ppo.curiosity`), since only the trainer sees a whole group."""
PLACEHOLDER = 0.0
"""``reward_score`` of a row without reward, since verl's tensors need a number."""
_EXTERNAL_ERRORS = (OSError, TimeoutError, asyncio.TimeoutError, aiohttp.ClientError)
"""Exceptions that a server, a network or a disk causes."""


class RewardOptions(BaseModel):
    """Options of every reward manager. Managers with further options extend this model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_seconds: float = Field(60.0, gt=0)
    """Deadline for grading one trajectory. If comparisons wait for a free slot, the deadline starts after the wait."""
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
    """Base class of reward managers. The reward of a trajectory is the score of `grade` plus shaping.

    ``reward_extra_info`` has the same keys for every trajectory: ``acc`` (0 or 1), ``base_score``, ``reward_fault``,
    ``reward_provoked``, each of `details`, and ``shaping/<term>``. A manager that rewards turns adds ``turn_rewards``,
    a JSON list, and its sum ``turn_reward``. A manager that rewards rows adds ``row_rewards``, a JSON list. Without a
    reward, the numbers are NaN and the lists empty.
    """

    Options: ClassVar[type[RewardOptions]] = RewardOptions
    details: ClassVar[tuple[str, ...]] = ()
    """All names that `Grade.details` may contain."""
    partial_credit: bool = False
    """Whether an answer that is not right may get a share of the right answer's score."""
    by_rows: ClassVar[bool] = False
    """Whether the manager rewards training rows: `Grade.row_rewards` are added to the score, each on its row."""
    keeps_deadlines: ClassVar[bool] = False
    """Whether `grade` enforces the deadline itself. This excludes the time in which a sample waits for others."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Decoder,
        compute_score: RawRewardFn = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Decoder | None = None,
    ) -> None:
        """verl passes all arguments; the last three are not used. Raises ConfigError for unknown or wrong options."""
        super().__init__(config, tokenizer, compute_score)
        self.options: OptionsT = options_in(config, self.Options, type(self).__name__)  # type: ignore[assignment]

    @property
    def by_turns(self) -> bool:
        """Whether the manager rewards turns (`Grade.turn_rewards`)."""
        return False

    @property
    def turn_weight(self) -> float:
        """Weight of the sum of turn rewards in the score. It must be 0 with an estimator that uses turn rewards;
        otherwise they would count twice."""
        return 0.0

    @abstractmethod
    async def grade(self, sample: Sample) -> Grade:
        """Grade one trajectory. Raises GraderFault if the grader fails."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Return ``{"reward_score": float, "reward_extra_info": {...}}`` of the last row of `data`. Called by verl."""
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
        except Exception as error:  # a bug of the grader must neither give the score 0 nor end the training
            log.exception("%s crashed on trajectory %s", type(self).__name__, sample.trajectory.trajectory_id)
            bug = "" if _is_external(error) else f" ({RAISES_ON_EMPTY})"
            return without_reward(f"{self._failure(error)}{bug}", extra)

    async def _grade_or_control(self, sample: Sample) -> tuple[Grade, str]:
        """Return the grade and an empty string. If grading fails, return the grade of an empty answer and the failure.

        If grading the empty answer raises too, the grader is broken, and the exception is raised.
        """
        try:
            return await self._grade(sample), ""
        except GraderFault:
            raise
        except Exception as error:  # anything that this answer may cause
            log.exception("%s crashed on trajectory %s", type(self).__name__, sample.trajectory.trajectory_id)
            return await self._grade(replace(sample, turns=("",))), self._failure(error)

    async def _grade(self, sample: Sample) -> Grade:
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

    def _with_reward(self, grade: Grade, shaping: dict[str, float], policy_induced: str) -> dict[str, Any]:
        extra = {
            REWARD_FAULT: "",
            POLICY_INDUCED: policy_induced,
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
        """Return ``reward_extra_info`` without a reward: the same keys as with one, except those of faults."""
        terms = (f"shaping/{name}" for name in self.options.shaping.terms())
        extra: dict[str, Any] = dict.fromkeys(("acc", "base_score", *self.details, *terms), math.nan)
        if self.by_turns:
            extra |= {TURN_REWARDS: "[]", TURN_REWARD: math.nan}
        return extra | {ROW_REWARDS: "[]"} if self.by_rows else extra


def _is_external(error: BaseException) -> bool:
    """Return whether `error`, or one that led to it, came from a judge or server and is not a bug of the manager."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return any(isinstance(each, _EXTERNAL_ERRORS) for each in chain)


def without_reward(why: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `run_single` if grading failed. `extra` are further values of ``reward_extra_info``."""
    log.warning("no reward: %s", why)
    return {"reward_score": PLACEHOLDER, "reward_extra_info": {REWARD_FAULT: why, POLICY_INDUCED: "", **extra}}


def options_in(config: DictConfig, kind: type[_Model], manager: str) -> _Model:
    """Read ``reward.reward_kwargs`` as `kind`. Raises ConfigError that names the option and those of `manager`."""
    # Resolved within the config, since it may refer to other parts of it.
    kwargs = config.reward.get("reward_kwargs") or {}
    options = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else kwargs
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(["reward.reward_kwargs", *map(str, problem["loc"])])
        known = ", ".join(sorted(kind.model_fields))
        raise ConfigError(f"{where}: {problem['msg']}; known options of {manager}: {known}") from None
