"""Terms that are added to a reward. Each is a function of the trajectory, multiplied by a weight.

`reward.reward_kwargs.shaping.<term>` enables a term, for example ``{weight: -0.25}``, with the options of the term. The
reward is the manager's score plus the sum of weight times value over the enabled terms. Values, before the weight:

| term | value | range |
|---|---|---|
| format | 1 if each of `tags` encloses text exactly once, in order | 0 or 1 |
| tool_used | 1 if a valid call was made | 0 or 1 |
| tool_valid | valid calls over all calls; 1 if there was none | 0 to 1 |
| tool_error | calls that failed by the model's doing, over all calls; 0 if there was none | 0 to 1 |
| turns | turns with a call over `limit`, at most 1 | 0 to 1 |
| unfinished | 1 if a limit, invalid calls or a fault ended the trajectory | 0 or 1 |
| overlong | 0 up to `limit - buffer` tokens, then linearly down to -1 at `limit` and beyond | -1 to 0 |
| tool_reward | sum (or mean) of the rewards that tools gave, cut to `bound` either way | -bound to bound |
| tool_cost | what the calls cost, by `costs` of the tools' names, else `default`; at most `limit` | 0 to limit |
| first_use | share of `tools` that were used with success; without `tools`, 1 if any was | 0 to 1 |
| repeat | calls that repeat an earlier one and were answered alike, over all calls; 0 if there was none | 0 to 1 |

`tool_cost` and `first_use` identify tools by the names that the model wrote (`CallRecord.names`), including aliases. A
call that ends the trajectory (`finish`) costs nothing and does not count as the use of a tool.

`overlong` is DAPO's soft overlong punishment (arXiv 2503.14476, equation 13). It counts the tokens after the prompt.
"""

from __future__ import annotations

import json
import re
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from verl_tool.agent_loop.actions import calls_of
from verl_tool.agent_loop.trajectory import CallRecord, ParsedCall
from verl_tool.agent_workers.reward_manager.grading.sample import Sample

ERROR_METRIC = "error"
"""Metric of calls that failed because of the model (`ToolResult.error`)."""
ERROR_TEXTS = ("Traceback (most recent call last)", "Execution timed out")
"""Texts in the observations of such calls, for servers that do not send the metric."""

_REMINDER = re.compile(r"<reminder>[^<]*</reminder>")
"""The number of remaining turns in observations of the tool `sql`, which changes with every call."""


class Term(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float


class Valued(Protocol):
    weight: float

    def value(self, sample: Sample) -> float: ...


class FormatTerm(Term):
    """Text in tags, ``<think>…</think><answer>…</answer>`` by default."""

    tags: tuple[str, ...] = Field(("think", "answer"), min_length=1)

    def value(self, sample: Sample) -> float:
        text, at = sample.text, 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return 0.0
            start, end = text.find(opening, at), text.find(closing, at)
            if start < 0 or end <= start + len(opening):
                return 0.0
            at = end + len(closing)
        return 1.0


class ToolUsedTerm(Term):
    """Whether any tool was used."""

    def value(self, sample: Sample) -> float:
        return float(any(call.valid for call in sample.trajectory.calls))


class ToolValidTerm(Term):
    """Share of valid calls."""

    def value(self, sample: Sample) -> float:
        calls = sample.trajectory.calls
        return sum(call.valid for call in calls) / len(calls) if calls else 1.0


class ToolErrorTerm(Term):
    """Share of calls that failed because of the model."""

    def value(self, sample: Sample) -> float:
        return error_rate(sample)


class TurnsTerm(Term):
    """Number of calls. A negative weight keeps it low."""

    limit: int = Field(ge=1)

    def value(self, sample: Sample) -> float:
        return min(len(sample.trajectory.calls) / self.limit, 1.0)


class UnfinishedTerm(Term):
    """Whether a limit or a fault ended the trajectory."""

    def value(self, sample: Sample) -> float:
        return float(not sample.trajectory.stop.finished)


class OverlongTerm(Term):
    """DAPO's soft punishment of long responses; `limit` and `buffer` in tokens."""

    limit: int = Field(ge=1)
    buffer: int = Field(ge=1)

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongTerm:
        if self.buffer > self.limit:
            raise ValueError(f"buffer is {self.buffer} tokens and limit {self.limit}; buffer must be at most limit")
        return self

    def value(self, sample: Sample) -> float:
        beyond = len(sample.trajectory.response_ids) - (self.limit - self.buffer)
        return -min(max(beyond / self.buffer, 0.0), 1.0)


class ToolRewardTerm(Term):
    """Rewards that the server's tools gave to the calls of this trajectory."""

    reduce: Literal["sum", "mean"] = "sum"
    bound: float = Field(1.0, gt=0)

    def value(self, sample: Sample) -> float:
        rewards = sample.trajectory.tool_rewards
        total = sum(rewards)
        if self.reduce == "mean" and rewards:
            total /= len(rewards)
        return min(max(total, -self.bound), self.bound)


class ToolCostTerm(Term):
    """Cost of the calls, with a price for each tool. Use it with a negative weight."""

    costs: dict[str, float] = Field(default_factory=dict)
    default: float = Field(1.0, ge=0)
    """Cost of a call of any other tool, and of one without a name."""
    limit: float = Field(10.0, gt=0)

    @field_validator("costs")
    @classmethod
    def _no_gain(cls, costs: dict[str, float]) -> dict[str, float]:
        gains = [name for name, cost in costs.items() if cost < 0]
        if gains:
            raise ValueError(f"the cost of {gains[0]} is below 0; set the sign by the term's weight")
        return costs

    def value(self, sample: Sample) -> float:
        calls = (call for call in sample.trajectory.calls if not call.done)
        total = sum(self.costs.get(name, self.default) for call in calls for name in call.names or ("",))
        return min(total, self.limit)


class FirstUseTerm(Term):
    """Whether each of `tools`, or any tool if none is named, was called successfully at least once."""

    tools: tuple[str, ...] = ()

    def value(self, sample: Sample) -> float:
        good = [call for call in sample.trajectory.calls if call.valid and not call.done and not failed(call)]
        used = {name for call in good for name in call.names}
        if not self.tools:
            return float(bool(good))
        return sum(name in used for name in self.tools) / len(self.tools)


class RepeatTerm(Term):
    """Share of calls that repeat an earlier one and got the same answer, and so gave the model nothing new."""

    def value(self, sample: Sample) -> float:
        exchanges = [exchange(call) for call in sample.trajectory.calls]
        return 1 - len(set(exchanges)) / len(exchanges) if exchanges else 0.0


class Shaping(BaseModel):
    """The enabled terms, none by default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: FormatTerm | None = None
    tool_used: ToolUsedTerm | None = None
    tool_valid: ToolValidTerm | None = None
    tool_error: ToolErrorTerm | None = None
    turns: TurnsTerm | None = None
    unfinished: UnfinishedTerm | None = None
    overlong: OverlongTerm | None = None
    tool_reward: ToolRewardTerm | None = None
    tool_cost: ToolCostTerm | None = None
    first_use: FirstUseTerm | None = None
    repeat: RepeatTerm | None = None

    def terms(self) -> dict[str, Valued]:
        """Return the enabled terms by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: term for name, term in named.items() if term is not None}

    def values(self, sample: Sample) -> dict[str, float]:
        """Return weight times value of each enabled term by name."""
        return {name: term.weight * term.value(sample) for name, term in self.terms().items()}


def error_rate(sample: Sample) -> float:
    """Return the share of calls that failed because of the model, 0 without calls.

    A call failed if its tool says so or it caused a fault, or if it was rejected with a reason, such as an unknown tool
    or wrong arguments. If there is no such information, it failed if its observation contains one of `ERROR_TEXTS`.
    """
    calls = sample.trajectory.calls
    return sum(map(failed, calls)) / len(calls) if calls else 0.0


def failed(call: CallRecord) -> bool:
    if call.invalid_reason is not None or (call.fault is not None and call.fault.kind.provokable):
        return True
    if ERROR_METRIC in call.metrics:
        return call.metrics[ERROR_METRIC] > 0
    return any(text in call.observation for text in ERROR_TEXTS)


def exchange(call: CallRecord) -> tuple[str, str]:
    """Return the text of a call and its answer, which are equal for repeated calls."""
    return extract_calls(call), _REMINDER.sub("", call.observation)


def extract_calls(record: CallRecord) -> str:
    """Return the calls of an action without the surrounding text, or the whole action if it has none.

    White space is normalised.
    """
    texts = [f"{call.name} {_payload(call)}" for call in calls_of(record)] or [record.action]
    return "\n".join(" ".join(text.split()) for text in texts)


def _payload(call: ParsedCall) -> str:
    arguments = json.loads(call.arguments)
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else json.dumps(arguments, sort_keys=True)
