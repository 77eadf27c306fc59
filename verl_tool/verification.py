"""What a verifier is, and what it said: a program that checks a trajectory's workspace after its end, or the
environment in which the trajectory took place.

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
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from verl_tool.content.packed_files import unpack
from verl_tool.errors import ConfigError
from verl_tool.protocol import Fault, FaultKind
from verl_tool.util.json_text import as_object

STYLE = "workspace_verifier"
"""``reward_model.style`` of a row whose ``ground_truth`` is a `Verification` as JSON."""
ENVIRONMENT_STYLE = "environment"
"""``reward_model.style`` of a row that its environment judges. Its ``ground_truth`` is `EnvironmentVerification.data`,
as an object or as JSON; empty if the environment needs none."""
_MIN_COPY_SECONDS = 60.0
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
    timeout_seconds: float = Field(default=120.0, gt=0, le=14400)
    """For the program. One that takes longer gives the reward 0."""
    env: dict[str, str] = {}
    """Variables on top of those of the sandbox."""
    user: Literal["", "root"] = ""
    """Who runs it in a container whose programs may change the image: they, or root, whose files they cannot change."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts that it reaches in a container. None: those of the trajectory."""

    @property
    def copy_seconds(self) -> float:
        """How long each of these may take: to copy a workspace's files, and to check the copy."""
        return max(_MIN_COPY_SECONDS, self.timeout_seconds)

    @property
    def max_seconds(self) -> float:
        """How long all of it may take, once there is room for it."""
        return self.timeout_seconds + 2 * self.copy_seconds + 2 * MARGIN_SECONDS

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


def caller_seconds(sent: object, call_seconds: float) -> float:
    """Return how long a caller waits for the answer to a verification: its own time and a margin, and not less than
    `call_seconds`. sent: `Verification.model_dump`; anything else: `call_seconds`."""
    seconds = sent.get("timeout_seconds") if isinstance(sent, Mapping) else None
    return max(call_seconds, seconds + MARGIN_SECONDS) if isinstance(seconds, int | float) else call_seconds


class EnvironmentVerification(BaseModel):
    """What the environment of a trajectory is sent for its verdict. No part of it may reach the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: dict[str, Any] = {}
    """What the environment judges by, such as the right answer, if `begin` did not bring it."""


AnyVerification = Verification | EnvironmentVerification


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
    by_environment: bool = False
    """Whether an environment judged, whose rewards may be any number."""

    @property
    def score(self) -> float | None:
        """What the trajectory gets: the reward, 0 in place of one that does not count. None: there was no verdict, by
        no fault of the trajectory's."""
        if self.fault is not None and not _by_the_workspace(self.fault):
            return None
        return self.reward if self.counts else 0.0

    @property
    def counts(self) -> bool:
        """Whether there is a reward, and a verifier's is from 0 to 1."""
        return self.reward is not None and (self.by_environment or 0.0 <= self.reward <= 1.0)


def _by_the_workspace(fault: Fault) -> bool:
    """Whether a trajectory may bring it about. What is sent for a verification is not the model's, and lateness is not
    its doing: a verifier that does not end in time and a workspace that is too large to be judged in time have a
    reward, and an environment judges a text of bounded length."""
    return fault.kind.provokable and fault.kind not in (FaultKind.BAD_REQUEST, FaultKind.TIMEOUT)


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


def read_environment_verification(value: object, where: str) -> EnvironmentVerification:
    """An `EnvironmentVerification` from its JSON or as a mapping. Raises ConfigError that begins with `where`."""
    try:
        return EnvironmentVerification.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: the environment's verification: {error.errors()[0]['msg']}") from None


def verification_of(reward_model: object, where: str, *, in_environment: bool = False) -> AnyVerification | None:
    """The verification of a row's ``reward_model``; None if it is graded otherwise. A row that begins `in_environment`
    is always judged by it. Raises ConfigError."""
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if style == ENVIRONMENT_STYLE:
        if not in_environment:
            words = "names none: set tools_kwargs.environment, {} if the server has just one"
            raise ConfigError(f"{where}: reward_model.style={style!r} needs an environment, and the row {words}")
        return EnvironmentVerification(data=_judged_by(truth, where))
    if style == STYLE and in_environment:
        raise ConfigError(
            f"{where}: a row with an environment has no workspace; leave out reward_model.style={STYLE!r}"
        )
    if style == STYLE:
        return read_verification(truth, where)
    return EnvironmentVerification() if in_environment else None


def _judged_by(truth: object, where: str) -> dict[str, Any]:
    """What the environment judges by, of a row's ``ground_truth``. Raises ConfigError."""
    if truth is None or truth == "":
        return {}
    value = as_object(truth)
    if value is None:
        raise ConfigError(f"{where}: reward_model.ground_truth is {truth!r:.80}; write an object, or one as JSON")
    return value


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
