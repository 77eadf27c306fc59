"""The options of the loop. They are documented in assets/docs/options.md.

Unknown, mistyped and contradictory options raise an error before anything starts.
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
    "queue_timeout": "tool_queue_timeout",
    "max_workers": "tool_call_max_workers",
    "request_interval": "tool_call_request_interval",
}
"""Maps ``tool_config.<key>`` to the option that it sets."""

_REPLACEMENTS = {
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
"""Options of other verl-tool versions that do not exist here, and what to do instead."""

SUMMARY_PROMPT = (
    "Your context is nearly full and will be cleared. Write down all that you need to finish the task: what you have "
    "found out, and what is left to do. Call no tool now."
)
SUMMARY_CONTINUATION = "Your context was cleared; above are your notes. Continue with the task."

_Tokens = Annotated[int, Field(ge=1)]


class EpisodeOptions(BaseModel):
    """Options of a trajectory. Lengths are in tokens and times in seconds; None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_agent: bool = True
    """Use tools. If False, every row is answered in one turn."""
    tool_server_url: str | None = None
    """Base URL of the tool server; a trailing ``/get_observation`` is accepted."""

    tool_schemas: ToolSchemas = "auto"
    """The tools that the prompt describes: ``none``, a list of names, or ``auto``. ``auto`` describes the tools that
    the row or request lists. If it lists none, it describes all tools of the server in chat mode and none inline."""
    tool_prompt: ToolPrompt = "auto"
    """How the prompt describes tools. ``auto`` uses the chat template if it accepts tools and teaches calls that the
    loop finds, else the format's usage text in the system message. ``system`` always uses the text, ``none`` never."""

    max_turns: int = Field(default=10, ge=0)
    """Maximum number of tool turns. After the last observation the model writes one more turn."""
    val_max_turns: int | None = Field(default=None, ge=0)
    """`max_turns` in validation, and when the run is served. Defaults to `max_turns`."""
    min_turns: int = Field(default=0, ge=0)
    """Until this many tool turns were made, a turn without an action is sent to the tool server too."""
    force_finish_for_last_turn: bool = False
    """End the trajectory after the observation of turn `max_turns`, without a final turn of the model."""
    call_tool_first: bool = False
    """Call the tool server with an empty action before the model's first turn, and append the answer to the prompt."""

    max_start_length: _Tokens | None = None
    """Maximum length of the row's prompt. A longer prompt is truncated on the left."""
    max_prompt_length: _Tokens | None = None
    """Maximum length of the prompt including the observation of `call_tool_first`."""
    max_response_length: _Tokens | None = None
    """Maximum length of a training row's response: tokens of the model and of the tools."""
    val_max_response_length: _Tokens | None = None
    """`max_response_length` in validation, and when the run is served. Defaults to `max_response_length`."""
    max_model_len: _Tokens | None = None
    """Maximum length of prompt and response together: the engine's context window."""
    max_action_length: _Tokens | None = None
    """Maximum length of one turn of the model."""
    max_obs_length: _Tokens | None = 512
    """Maximum length of one observation, including the truncation mark but not the tokens of the chat template."""
    truncate_obs_side: Side = "middle"
    """The side that is dropped of an observation longer than `max_obs_length`."""
    truncate_response_side: Side = "right"
    """The side that is dropped of the observation that exceeds `max_response_length`. The trajectory ends there.
    Tokens of the model are never dropped."""

    context: Literal["append", "drop_thoughts", "window", "summarise"] = "append"
    """What the model is fed at each turn. ``append``: everything so far. ``drop_thoughts``: the same, without the
    thoughts of earlier turns. ``window``: the prompt and the last `context_turns` turns. ``summarise``: the prompt and
    a summary, which the model writes when the context exceeds `context_tokens`. A shortened context starts a new
    training row."""
    context_turns: int | None = Field(default=None, ge=1)
    """Number of turns that ``window`` keeps, each with its observation."""
    context_tokens: _Tokens | None = None
    """``window`` and ``summarise`` leave a context of up to this many tokens unchanged."""
    summary_tokens: _Tokens = 256
    """Maximum length of one summary."""
    summary_prompt: str = Field(default=SUMMARY_PROMPT, min_length=1)
    """Request for a summary, appended to an observation."""
    summary_continuation: str = Field(default=SUMMARY_CONTINUATION, min_length=1)
    """Text that follows the summary in the new context."""
    subagents: bool = False
    """Give the model the tool ``delegate``: a sub-agent does a task in its own context and training row."""
    max_subagents: int = Field(default=4, ge=1)
    """Maximum number of sub-agents per trajectory."""
    max_subagent_depth: int = Field(default=1, ge=1)
    """Maximum nesting of sub-agents. With 1, a sub-agent cannot delegate."""
    max_subagent_turns: int | None = Field(default=None, ge=0)
    """`max_turns` of a sub-agent. Defaults to the limit of the agent that delegates."""
    max_invalid_calls: int | None = Field(default=None, ge=1)
    """End the trajectory after this many invalid calls in a row."""

    action_stop_tokens: tuple[str, ...] = ()
    """Strings that end an action: a list, or the path of a file with a JSON list or with comma-separated strings."""
    formats: tuple[str, ...] | None = None
    """Tool-call formats: names of built-in formats, ``<name>`` for a tag, entry points, or paths of Python files. The
    tool server finds calls in these formats only. None selects all built-in formats; the server then also finds the
    tags of its tools. The loop does not, unless a stop string ends the turn."""
    additional_eos_token_ids: tuple[int, ...] = ()
    """Token ids that end the model's turn, like the tokenizer's own end-of-sequence token."""
    turn_end_token: str | None = None
    """The token that closes the model's turn. It ends generation, and in chat mode it is added (mask 0) after a turn
    that a stop string ended. Defaults to the token that the chat template writes."""

    enable_mtrl: bool = False
    """Chat mode: an observation is a new turn of the chat. If False, it continues the model's turn (inline)."""
    mtrl_role: str = Field(default="user", min_length=1)
    """Role of an observation's turn in chat mode."""
    mtrl_sep: str | None = None
    """Text of an observation's turn, with ``{obs}`` in it. It replaces the chat template."""

    mask_observations: bool = True
    """Leave tool and template tokens out of the loss."""
    mask_overlong_loss: bool = False
    """Leave trajectories that a limit of length or turns ended out of the loss."""
    mask_void_traj: bool = False
    """Leave trajectories with neither a valid tool call nor a final answer out of the loss."""
    answer_markers: tuple[str, ...] = ("\\boxed{", "final_answer(", "<answer>", "<submit>")
    """Strings that mark a final answer, for `mask_void_traj`."""

    max_concurrent_trajectories: Annotated[int, Field(ge=1)] | None = 1024
    """Maximum number of trajectories that one `Episode` runs concurrently."""
    generation_timeout: float = Field(default=3600.0, gt=0)
    """Deadline of one turn of the model."""
    tool_call_timeout: float = Field(default=60.0, gt=0)
    """Deadline of one tool call, including all retries."""
    tool_queue_timeout: float = Field(default=1800.0, ge=0)
    """How long a call may wait in a queue of the tool server for the start of a container or a verifier, in addition to
    `tool_call_timeout`."""
    tool_call_max_retries: int | None = Field(default=None, ge=0)
    """Number of retries of a call, where a retry is safe. By default, a call is retried until `tool_call_timeout` if
    the server cannot be reached or accepts no calls, and 3 times after other transient failures."""
    tool_call_retry_delay: float = Field(default=0.5, ge=0)
    """Delay before the first retry."""
    tool_call_max_workers: int = Field(default=256, ge=1)
    """Maximum number of concurrent requests to the tool server."""
    tool_call_request_interval: float = Field(default=0.0, ge=0)
    """Minimum time between two requests to the tool server."""
    max_fault_fraction: float = Field(default=0.5, ge=0, le=1)
    """The run ends if more than this fraction of a step's trajectories end in a fault."""
    max_call_fault_fraction: float = Field(default=0.5, ge=0, le=1)
    """The run ends if more than this fraction of a step's calls (20 or more) end in a fault."""
    max_reward_fault_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run ends if more than this fraction of a step's answers get no reward, or if the reward manager raises on
    answers as it does on an empty one. 1 disables both checks."""
    enable_tqdm: bool = True
    """Show a progress bar."""
    record_images: Literal["none", "validation", "all"] = "validation"
    """Which of a training's trajectories have their images stored with the records (`trajectories_dir`)."""

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> EpisodeOptions:
        """Load options from the mapping of a config file or command line, and resolve ``tool_config`` aliases.

        Raises ConfigError that names each wrong option and what to do.
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
        """Whether a prompt describes tools if its row lists none."""
        if self.tool_schemas == "auto":
            return self.enable_agent and self.enable_mtrl
        return self.enable_agent and self.tool_schemas not in ("none", ())

    @property
    def makes_rows(self) -> bool:
        """Whether a trajectory may become several training rows. These support text only."""
        return self.context != "append" or self.subagents

    def for_validation(self) -> EpisodeOptions:
        """Return the options with the limits of validation."""
        limits = {"max_turns": self.val_max_turns, "max_response_length": self.val_max_response_length}
        provided = {name: value for name, value in limits.items() if value is not None}
        own = self.model_dump(exclude_unset=True, exclude={f"val_{name}" for name in limits})
        return EpisodeOptions(**(own | provided))

    def client_settings(self) -> dict[str, float | int | None]:
        """Keyword arguments of `verl_tool.client.ToolClient`."""
        return {
            "timeout": self.tool_call_timeout,
            "queue_timeout": self.tool_queue_timeout,
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
        """Split the string of a command line at commas."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("tool_schemas", mode="before")
    @classmethod
    def _names_of_tools(cls, value: object) -> object:
        """Split the string of a command line into names."""
        if not isinstance(value, str) or value in ("auto", "none"):
            return value
        return tuple(name.strip() for name in value.strip("[]").split(",") if name.strip())

    @field_validator("action_stop_tokens", "answer_markers")
    @classmethod
    def _no_empty_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("every text contains the empty string; take it out of the list")
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
                f"enable_agent=False uses no tool, and tool_schemas={list(self.tool_schemas)} describes some; drop one",
            ),
            (
                self.tool_schemas == "none" and self.tool_prompt == "system",
                "tool_schemas=none describes no tool, and tool_prompt=system says how to describe them; drop one",
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
                f"mtrl_sep={sep!r} contains {{obs}} {sep.count('{obs}')} times; write it exactly once",
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
    options = [f"{name} ({_REPLACEMENTS[name]})" if name in _REPLACEMENTS else name for name in unknown]
    return f"unknown option {'; '.join(options)}; known: {', '.join(known)}, tool_config"


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
            f"action_stop_tokens={str(path)!r} is not a readable file ({error.strerror}); "
            'give a list such as ["</python>"], or the path of a file with one'
        ) from error
    if text.lstrip().startswith("["):
        return _json_stops(path, text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _json_stops(path: Path, text: str) -> list[str]:
    try:
        stops: list[str] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} starts like a JSON list but is not one: {error}") from error
    return stops
