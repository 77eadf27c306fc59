"""The options of the loop, under the names that verl-tool's users set. One table of them: assets/docs/options.md.

Unknown, mistyped and contradictory options are errors before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from verl_tool.errors import ConfigError

Side = Literal["left", "right", "middle"]
"""The side that is dropped."""
ToolSchemas = Literal["auto", "none"] | tuple[str, ...]
ToolPrompt = Literal["auto", "system", "none"]

TOOL_CONFIG_ALIASES = {
    "enabled": "enable_agent",
    "server_url": "tool_server_url",
    "max_tool_turns": "max_turns",
    "max_retries": "tool_call_max_retries",
    "retry_delay": "tool_call_retry_delay",
    "timeout": "tool_call_timeout",
    "max_workers": "tool_call_max_workers",
    "request_interval": "tool_call_request_interval",
}
"""``tool_config.<key>`` and the option that it sets."""

_MENDS = {
    "tool_call_time_out": "it is called tool_call_timeout",
    "min_action_num": "it is called min_turns",
    "retokenization": "leave it out: what the model wrote is never decoded and encoded again",
    "rolling_with_prompt": "set context=window and context_turns",
    "rollout_mode": "leave it out: rollouts are always asynchronous",
    "over_sampling": "leave it out; see data.gen_batch_size and the trainer's group filter",
    "assistant_role": "leave it out: the chat template names the assistant",
    "n": "set actor_rollout_ref.rollout.n",
    "num_gpus": "set trainer.n_gpus_per_node",
    "logprobs": "set actor_rollout_ref.rollout.calculate_log_probs",
}
"""Options of other versions that are not ours, and what to do instead."""

SUMMARY_PROMPT = (
    "Your context is nearly full and will be cleared. Write down all that you need to finish the task: what you have "
    "found out, and what is left to do. Call no tool now."
)
SUMMARY_CONTINUATION = "Your context was cleared; above are your notes. Continue with the task."

_Tokens = Annotated[int, Field(ge=1)]


class EpisodeOptions(BaseModel):
    """How a trajectory runs. Lengths are in tokens, times in seconds; None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_agent: bool = True
    """False: every row is answered in one turn, without tools."""
    tool_server_url: str | None = None
    """Base URL of the tool server; a trailing ``/get_observation`` is accepted."""

    tool_schemas: ToolSchemas = "auto"
    """The tools that the prompt tells of: ``none``, the named ones, or ``auto``: those that the row or the request
    lists, and where it lists none, all of the tool server's in chat mode and none inline."""
    tool_prompt: ToolPrompt = "auto"
    """How it tells of them. ``auto``: by the chat template, where it takes tools and teaches calls that the loop finds,
    else by the format's usage text in the system message. ``system``: always by that. ``none``: never by that."""

    max_turns: int = Field(default=10, ge=0)
    """Most tool turns of a trajectory. Behind the last observation the model writes one more turn."""
    val_max_turns: int | None = Field(default=None, ge=0)
    """The same in the trainer's validation, and where its run is served. None: `max_turns`."""
    min_turns: int = Field(default=0, ge=0)
    """Before this many tool turns, a turn without an action goes to the tool server too, and its answer continues."""
    force_finish_for_last_turn: bool = False
    """End the trajectory behind the observation of turn `max_turns`; the model writes nothing after it."""
    call_tool_first: bool = False
    """Ask the tool server with an empty action before the model's first turn; its observation ends the prompt."""

    max_start_length: _Tokens | None = None
    """The row's own prompt; a longer one is truncated on the left."""
    max_prompt_length: _Tokens | None = None
    """The prompt as the model first sees it: the row's own, and what `call_tool_first` added."""
    max_response_length: _Tokens | None = None
    """All tokens behind the prompt of a training row, the model's and the tools'."""
    val_max_response_length: _Tokens | None = None
    """The same in the trainer's validation, and where its run is served. None: `max_response_length`."""
    max_model_len: _Tokens | None = None
    """Prompt and response together: what the engine takes."""
    max_action_length: _Tokens | None = None
    """One turn of the model."""
    max_obs_length: _Tokens | None = 512
    """One observation, the mark of truncation counted, the tokens of the chat template not counted."""
    truncate_obs_side: Side = "middle"
    """The side of an observation above `max_obs_length` that is dropped."""
    truncate_response_side: Side = "right"
    """The side of the observation that crosses `max_response_length` that is dropped. The trajectory ends there.
    Tokens of the model are never dropped."""

    context: Literal["append", "drop_thoughts", "window", "summarise"] = "append"
    """What the model is fed at each turn: all that came before; the same without the thoughts of earlier turns; the
    prompt and the last `context_turns` turns; or the prompt and its own summary, which it writes when the context has
    more than `context_tokens`. A context that loses something starts a training row of its own."""
    context_turns: int | None = Field(default=None, ge=1)
    """The turns that ``window`` keeps, each with its observation."""
    context_tokens: _Tokens | None = None
    """Up to this many tokens ``window`` and ``summarise`` leave the context as it is."""
    summary_tokens: _Tokens = 256
    """One summary."""
    summary_prompt: str = Field(default=SUMMARY_PROMPT, min_length=1)
    """Asks for a summary, behind an observation."""
    summary_continuation: str = Field(default=SUMMARY_CONTINUATION, min_length=1)
    """Follows the summary in the new context."""
    subagents: bool = False
    """The model has the tool ``delegate``: a sub-agent does a task in a context, and a training row, of its own."""
    max_subagents: int = Field(default=4, ge=1)
    """Most sub-agents of one trajectory."""
    max_subagent_depth: int = Field(default=1, ge=1)
    """1: sub-agents do not delegate; 2: theirs do not; and so on."""
    max_subagent_turns: int | None = Field(default=None, ge=0)
    """`max_turns` of a sub-agent. None: as of the agent that delegates."""
    max_invalid_calls: int | None = Field(default=None, ge=1)
    """A trajectory ends after so many invalid calls in a row."""

    action_stop_tokens: tuple[str, ...] = ()
    """Strings that end an action: a list, or the path of a file with a JSON list or with comma-separated strings."""
    formats: tuple[str, ...] | None = None
    """Formats in which the model calls: names of built-in ones, ``<name>`` for a tag, entry points, paths of Python
    files. The tool server looks for calls in no others. None: all built-in ones; the server then finds its tools' own
    tags too, and the loop does not, where no stop string ends a turn."""
    additional_eos_token_ids: tuple[int, ...] = ()
    """Token ids that end the model's turn, like the tokenizer's own end-of-sequence token."""
    turn_end_token: str | None = None
    """The token that closes the model's turn. It ends generation, and it is added (mask 0) behind a turn that a stop
    string ended in chat mode. None: what the chat template writes."""

    enable_mtrl: bool = False
    """Chat mode: an observation is a new turn of the chat. False: it continues the model's own turn (inline)."""
    mtrl_role: str = Field(default="user", min_length=1)
    """The role of that turn."""
    mtrl_sep: str | None = None
    """Text of that turn with ``{obs}`` in it, in place of the chat template."""

    mask_observations: bool = True
    """False puts the loss on tool and template tokens too."""
    mask_overlong_loss: bool = False
    """Leave a trajectory out of the loss that a limit of length or turns ended."""
    mask_void_traj: bool = False
    """Leave a trajectory out of the loss that has neither a valid tool call nor a final answer."""
    answer_markers: tuple[str, ...] = ("\\boxed{", "final_answer(", "<answer>", "<submit>")
    """Strings that show a final answer, for `mask_void_traj`."""

    max_concurrent_trajectories: Annotated[int, Field(ge=1)] | None = 1024
    """Most trajectories that one `Episode` runs at a time."""
    generation_timeout: float = Field(default=3600.0, gt=0)
    """Deadline of one turn of the model."""
    tool_call_timeout: float = Field(default=60.0, gt=0)
    """Deadline of one tool call, all retries counted."""
    tool_call_max_retries: int | None = Field(default=None, ge=0)
    """Retries of a call where a retry is safe. None: until `tool_call_timeout` while the server cannot be reached or
    takes nothing, and 3 of what else may pass."""
    tool_call_retry_delay: float = Field(default=0.5, ge=0)
    """First pause before a retry."""
    tool_call_max_workers: int = Field(default=256, ge=1)
    """Most requests to the tool server at a time."""
    tool_call_request_interval: float = Field(default=0.0, ge=0)
    """Least time between two requests to the tool server."""
    max_fault_fraction: float = Field(default=0.5, ge=0, le=1)
    """The run ends if more than this fraction of a step's trajectories end in a fault."""
    max_call_fault_fraction: float = Field(default=0.5, ge=0, le=1)
    """The run ends if more than this fraction of the calls (of a step, of 20 at least) end in a fault."""
    max_reward_fault_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run ends if more than this fraction of a step's answers get no reward, or if the reward manager raises at
    answers as it does at an empty one; 1: neither."""
    enable_tqdm: bool = True
    """Show a progress bar."""
    record_images: Literal["none", "validation", "all"] = "validation"
    """Of which trajectories of a training the images are kept beside the records (`trajectories_dir`)."""

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> EpisodeOptions:
        """Options from a config file's or a command line's mapping, ``tool_config`` aliases resolved.

        Raises ConfigError that names each wrong option and its mend.
        """
        flat = _without_aliases(values)
        unknown = sorted(set(flat) - set(cls.model_fields))
        if unknown:
            raise ConfigError(_unknown_message(unknown, sorted(cls.model_fields)))
        try:
            return cls(**flat)
        except ValidationError as error:
            raise ConfigError(_validation_message(error)) from error

    @property
    def describes_tools(self) -> bool:
        """Whether the prompt of a row that lists no tools tells of some."""
        if self.tool_schemas == "auto":
            return self.enable_agent and self.enable_mtrl
        return self.enable_agent and self.tool_schemas not in ("none", ())

    @property
    def makes_rows(self) -> bool:
        """Whether a trajectory may have several training rows, which are of text only."""
        return self.context != "append" or self.subagents

    def of_validation(self) -> EpisodeOptions:
        """The options with validation's limits in place of the training's."""
        limits = {"max_turns": self.val_max_turns, "max_response_length": self.val_max_response_length}
        provided = {name: value for name, value in limits.items() if value is not None}
        own = self.model_dump(exclude_unset=True, exclude={f"val_{name}" for name in limits})
        return EpisodeOptions(**(own | provided))

    def client_settings(self) -> dict[str, float | int | None]:
        """Keyword arguments of `verl_tool.client.ToolClient`."""
        return {
            "timeout": self.tool_call_timeout,
            "max_retries": self.tool_call_max_retries,
            "retry_delay": self.tool_call_retry_delay,
            "max_workers": self.tool_call_max_workers,
            "request_interval": self.tool_call_request_interval,
        }

    @field_validator("action_stop_tokens", mode="before")
    @classmethod
    def _stops_from_file(cls, value: object) -> object:
        return _read_stops(Path(value)) if isinstance(value, str) else value

    @field_validator("formats", mode="before")
    @classmethod
    def _formats_in_a_string(cls, value: object) -> object:
        """A command line gives one name, or several with commas between them."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("tool_schemas", mode="before")
    @classmethod
    def _names_of_tools(cls, value: object) -> object:
        """A command line gives names in one string."""
        if not isinstance(value, str) or value in ("auto", "none"):
            return value
        return tuple(name.strip() for name in value.strip("[]").split(",") if name.strip())

    @field_validator("action_stop_tokens", "answer_markers")
    @classmethod
    def _no_empty_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty string stands in every text; take it out of the list")
        return value

    @model_validator(mode="after")
    def _no_contradiction(self) -> EpisodeOptions:
        for wrong, message in self._contradictions():
            if wrong:
                raise ValueError(message)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        start, prompt = self.max_start_length, self.max_prompt_length
        return [
            (
                self.min_turns > self.max_turns,
                f"min_turns={self.min_turns} is above max_turns={self.max_turns}; lower it or raise max_turns",
            ),
            (
                self.force_finish_for_last_turn and self.max_turns == 0,
                "force_finish_for_last_turn=True with max_turns=0 lets the model write nothing; raise max_turns",
            ),
            (
                self.val_max_turns is not None and self.min_turns > self.val_max_turns,
                f"min_turns={self.min_turns} is above val_max_turns={self.val_max_turns}; lower it or raise that",
            ),
            (
                self.force_finish_for_last_turn and self.val_max_turns == 0,
                "force_finish_for_last_turn=True with val_max_turns=0 lets the model write nothing; raise it",
            ),
            (
                start is not None and prompt is not None and start > prompt,
                f"max_start_length={start} is above max_prompt_length={prompt}; the prompt holds the start",
            ),
            (
                not self.enable_agent and (self.call_tool_first or self.min_turns > 0),
                "enable_agent=False calls no tool, but call_tool_first or min_turns asks for calls; drop one of them",
            ),
            (
                self.enable_agent and not self.enable_mtrl and not self.action_stop_tokens,
                "inline actions need action_stop_tokens (nothing else ends an action within a turn); "
                "set them, or enable_mtrl=True for chat turns, or enable_agent=False",
            ),
            (
                not self.enable_agent and self.subagents,
                "enable_agent=False uses no tool, and subagents=True adds one; drop one of them",
            ),
            (
                not self.enable_agent and isinstance(self.tool_schemas, tuple),
                f"enable_agent=False uses no tool, and tool_schemas={list(self.tool_schemas)} tells of some; drop one",
            ),
            (
                self.tool_schemas == "none" and self.tool_prompt == "system",
                "tool_schemas=none tells of no tool, and tool_prompt=system says how; drop one of them",
            ),
            *self._separator_contradictions(),
            *self._context_contradictions(),
        ]

    def _context_contradictions(self) -> list[tuple[bool, str]]:
        tokens, model = self.context_tokens, self.max_model_len
        return [
            (
                self.context == "window" and self.context_turns is None,
                "context=window needs context_turns, the turns that it keeps",
            ),
            (
                self.context == "summarise" and tokens is None,
                "context=summarise needs context_tokens, above which the model writes a summary",
            ),
            (
                self.context != "window" and self.context_turns is not None,
                f"context_turns={self.context_turns} has no effect with context={self.context}; drop one of them",
            ),
            (
                self.context in ("append", "drop_thoughts") and tokens is not None,
                f"context_tokens={tokens} has no effect with context={self.context}; drop one of them",
            ),
            (
                tokens is not None and model is not None and tokens >= model,
                f"context_tokens={tokens} is not below max_model_len={model}, where a trajectory ends; lower it",
            ),
        ]

    def _separator_contradictions(self) -> list[tuple[bool, str]]:
        sep = self.mtrl_sep
        if sep is None:
            return []
        return [
            (not self.enable_mtrl, "mtrl_sep is set and enable_mtrl is False; set enable_mtrl=True or drop mtrl_sep"),
            (
                sep.count("{obs}") != 1,
                f"mtrl_sep={sep!r} holds {{obs}} {sep.count('{obs}')} times; write it just once",
            ),
            (
                "mtrl_role" in self.model_fields_set,
                "mtrl_sep and mtrl_role are both set; mtrl_sep writes the whole turn, its role too: drop mtrl_role",
            ),
        ]


def _without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in values.items() if name != "tool_config"}
    aliases = values.get("tool_config") or {}
    if not isinstance(aliases, Mapping):
        raise ConfigError(f"tool_config is a {type(aliases).__name__}; give a mapping of {sorted(TOOL_CONFIG_ALIASES)}")
    unknown = sorted(set(aliases) - set(TOOL_CONFIG_ALIASES))
    if unknown:
        raise ConfigError(f"tool_config.{unknown[0]} is unknown; known: {', '.join(sorted(TOOL_CONFIG_ALIASES))}")
    for alias, value in aliases.items():
        name = TOOL_CONFIG_ALIASES[alias]
        if name in flat and flat[name] != value:
            raise ConfigError(
                f"tool_config.{alias}={value!r} and {name}={flat[name]!r} set the same option; give just one of them"
            )
        flat[name] = value
    return flat


def _unknown_message(unknown: list[str], known: list[str]) -> str:
    description = [f"{name} ({_MENDS[name]})" if name in _MENDS else name for name in unknown]
    return f"unknown option {'; '.join(description)}; known: {', '.join(known)}, tool_config"


def _validation_message(error: ValidationError) -> str:
    problems = []
    for detail in error.errors():
        where = ".".join(str(part) for part in detail["loc"])
        got = f" (got {detail['input']!r})" if where else ""
        problems.append(f"{where}: {detail['msg']}{got}" if where else detail["msg"].removeprefix("Value error, "))
    return "; ".join(problems)


def _read_stops(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"action_stop_tokens={str(path)!r} is no readable file ({error.strerror}); "
            'give a list such as ["</python>"], or the path of a file with one'
        ) from error
    if text.lstrip().startswith("["):
        return _json_stops(path, text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _json_stops(path: Path, text: str) -> list[str]:
    try:
        stops: list[str] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} starts like a JSON list and is none: {error}") from error
    return stops
