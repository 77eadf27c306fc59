"""What a verifier is, and what it said: a program that checks a trajectory's workspace after its end.

The layout is that of Harbor's tasks (https://www.harborframework.com/docs/tasks): the verifier's files are in
``/tests``, ``/tests/test.sh`` is run in a copy of the workspace, and writes its reward into
``/logs/verifier/reward.json`` (an object with the number ``reward``) or ``/logs/verifier/reward.txt`` (a number). If
``reward.json`` is there, it alone decides. An exit code other than 0 is the reward 0, whatever was written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from verl_tool.content.packed_files import unpack
from verl_tool.errors import ConfigError
from verl_tool.protocol import Fault, FaultKind

STYLE = "workspace_verifier"
"""``reward_model.style`` of a row whose ``ground_truth`` is a `Verification` as JSON."""
MARGIN_SECONDS = 30.0
"""Beside the verifier's own time: to end the trajectory's programs and to lay out the files."""
MAX_REWARD_BYTES = 1 << 16
"""Of a reward file."""
_MAX_NUMBERS = 64
"""In one."""


class Verification(BaseModel):
    """A verifier: what is put into ``/tests``, and how it is run. No part of it may reach the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: str
    """Of `verl_tool.content.packed_files.pack`; ``test.sh`` is among them."""
    timeout_seconds: float = Field(default=120.0, gt=0, le=3600)
    """For the program. One that takes longer gives the reward 0."""
    env: dict[str, str] = {}
    """Variables on top of those of the sandbox."""

    @field_validator("files")
    @classmethod
    def _has_a_script(cls, value: str) -> str:
        try:
            files = unpack(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if "test.sh" not in files:
            raise ValueError(f"there is no test.sh among {sorted(files)!r:.200}")
        return value


@dataclass(frozen=True)
class Verdict:
    """What a verifier said of a trajectory's workspace. The model never sees any of it."""

    reward: float | None = None
    """None: it could not be run, by no fault of the trajectory's; see `fault`."""
    told: str = ""
    """Why the reward is 0 without the verifier's saying so, if it is; then the end of what the verifier printed."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What else ``reward.json`` holds."""
    fault: Fault | None = None
    seconds: float = 0.0
    """That it all took."""

    @property
    def score(self) -> float | None:
        """What the trajectory gets: the reward if it is from 0 to 1, else 0. None: the verifier could not be run, by
        no fault of the trajectory's."""
        if self.fault is not None and not _by_the_workspace(self.fault):
            return None
        return self.reward if self.counts else 0.0

    @property
    def counts(self) -> bool:
        """Whether there is a reward, from 0 to 1."""
        return self.reward is not None and 0.0 <= self.reward <= 1.0


def _by_the_workspace(fault: Fault) -> bool:
    """Whether a workspace may bring it about. What is sent for a verification is not the model's."""
    return fault.kind.provokable and fault.kind is not FaultKind.BAD_REQUEST


def read_verification(value: object, where: str) -> Verification:
    """A `Verification` from its JSON or as a mapping. Raises ConfigError that begins with `where`."""
    try:
        if isinstance(value, str):
            return Verification.model_validate_json(value)
        return Verification.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
    at = ".".join(str(part) for part in problem["loc"])
    why = problem["msg"].removeprefix("Value error, ")
    raise ConfigError(f"{where}: the verification{f' at {at}' if at else ''}: {why}")


def verification_of(reward_model: object, where: str) -> Verification | None:
    """The verification of a row's ``reward_model``; None if it is graded otherwise. Raises ConfigError."""
    if not isinstance(reward_model, Mapping) or reward_model.get("style") != STYLE:
        return None
    return read_verification(reward_model.get("ground_truth"), where)


def reward_in(json_file: bytes | None, text_file: bytes | None) -> tuple[float, dict[str, float]]:
    """The reward and the other numbers of what a verifier wrote; ``reward.json`` stands before ``reward.txt``.

    Raises ValueError that says why there is no reward.
    """
    if json_file is not None:
        return _reward_of_json(json_file)
    if text_file is None:
        raise ValueError("the verifier wrote neither reward.json nor reward.txt into /logs/verifier")
    return _finite(_text(text_file, "reward.txt").strip(), "reward.txt"), {}


def _reward_of_json(content: bytes) -> tuple[float, dict[str, float]]:
    try:
        value: Any = json.loads(_text(content, "reward.json"))
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"reward.json is {content!r:.80}, which is no JSON") from None
    if not isinstance(value, dict) or not value or len(value) > _MAX_NUMBERS:
        raise ValueError(f"reward.json is {content!r:.80}; it must be an object with 1 to {_MAX_NUMBERS} numbers")
    numbers = {name[:80]: _finite(number, f"reward.json: {name[:80]!r}") for name, number in value.items()}
    if "reward" not in numbers and len(numbers) > 1:
        raise ValueError(f"reward.json has the numbers {sorted(numbers)!r:.200} and none named 'reward'")
    reward = numbers.pop("reward") if "reward" in numbers else next(iter(numbers.values()))
    return reward, numbers


def _text(content: bytes, name: str) -> str:
    if len(content) > MAX_REWARD_BYTES:
        raise ValueError(f"{name} has {len(content)} bytes, and {MAX_REWARD_BYTES} is the limit")
    return content.decode("utf-8", "replace")


def _finite(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r:.80}, which is no finite number")
    return number
