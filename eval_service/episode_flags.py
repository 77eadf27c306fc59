"""The loop's options as flags of a command line, under their own names."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.errors import ConfigError

PANEL = "The loop (what each means: assets/docs/options.md; default: the run's, else the loop's own)"
TRAINING_ONLY = frozenset(
    {
        "mask_observations",
        "mask_overlong_loss",
        "mask_void_traj",
        "answer_markers",
        "max_fault_fraction",
        "max_call_fault_fraction",
        "max_reward_fault_fraction",
        "enable_tqdm",
        "record_images",
        "val_max_turns",
        "val_max_response_length",
    }
)
"""Options that change nothing about an answer."""
STOPS = "action_stop_tokens"

Command = TypeVar("Command", bound=Callable[..., Any])


def with_episode_flags(command: Command) -> Command:
    """Give a typer command one flag for each option of the loop; they arrive in its ``**episode`` as None if unset."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name))
        for name in EpisodeOptions.model_fields
        if name not in TRAINING_ONLY
    ]
    command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    hints = {name: hint for name, hint in inspect.get_annotations(command, eval_str=True).items() if name != "episode"}
    command.__annotations__ = hints | {flag.name: flag.annotation for flag in flags}
    return command


def set_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were set. Raises ConfigError for a list that cannot be read."""
    chosen = {name: value for name, value in flags.items() if value is not None}
    if STOPS in chosen:
        chosen[STOPS] = _strings(chosen[STOPS])
    if "additional_eos_token_ids" in chosen:
        chosen["additional_eos_token_ids"] = tuple(map(int, _strings(chosen["additional_eos_token_ids"])))
    return chosen


def merged_options(base: EpisodeOptions | None, given: Mapping[str, Any]) -> EpisodeOptions:
    """`base` with what was `given` in its place. Raises ConfigError."""
    if base is None:
        return EpisodeOptions.load(given)
    chosen = {name: getattr(base, name) for name in base.model_fields_set}
    return EpisodeOptions.load(chosen | dict(given))


def _annotation(name: str) -> Any:
    kind = _plain(EpisodeOptions.model_fields[name].annotation)
    flag = f"--{name}/--no_{name}" if kind is bool else f"--{name}"
    return Annotated[kind | None, typer.Option(flag, rich_help_panel=PANEL)]


def _plain(annotation: Any) -> Any:
    """A type that a command line can parse: text for a list or a choice."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (tuple, Literal):
        return str
    return annotation


def _strings(text: str) -> tuple[str, ...]:
    """A JSON list, a file that holds one, or strings with commas between them."""
    path = Path(text)
    if not text.lstrip().startswith("[") and path.is_file():
        text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text!r} starts like a JSON list and is none: {error}") from error
    return tuple(str(value) for value in values)
