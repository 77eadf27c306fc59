"""The ``config.json`` of the model that is trained, from a folder, from the cache of the hub, or from the hub."""

from __future__ import annotations

import functools
from pathlib import Path

import httpx
from huggingface_hub import file_exists
from transformers import AutoConfig, PretrainedConfig


def load_config(model: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model in a folder or on the hub. Raises OSError or ValueError if it cannot be had.

    What is on this machine is not asked for, and the hub is asked once a process, without retries.
    """
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    except OSError:
        if not is_hub_name(model) or _hub_problem(model) is not None:
            raise
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)


def model_type(model: str, *, trust_remote_code: bool = False) -> str | None:
    """The ``model_type`` of the model in a folder or on the hub; None if it cannot be had."""
    try:
        return str(load_config(model, trust_remote_code=trust_remote_code).model_type)
    except (OSError, ValueError):
        return None


def is_hub_name(model: str) -> bool:
    """Whether `model` is a name on a model hub, such as ``owner/name``, and no folder."""
    named = model.count("/") <= 1 and "://" not in model and not model.startswith(("/", "~", "."))
    return named and not Path(model).is_dir()


def why_not_loaded(model: str) -> str | None:
    """Why a model of the hub cannot be had, in words that follow its name; None if it can, or is none of the hub's."""
    if not is_hub_name(model):
        return None
    try:
        load_config(model)
    except OSError as error:
        return f"is not on this machine, and {_hub_problem(model) or error}"
    except ValueError:
        return None  # it is there, and of no kind that transformers knows
    return None


@functools.cache
def _hub_problem(model: str) -> str | None:
    try:
        found = file_exists(model, "config.json")  # transformers would try six times, for half a minute
    except (OSError, httpx.HTTPError) as error:
        reason = str(error).partition("\n")[0]
        return f"the hub cannot be asked for it ({reason})"
    return None if found else "the hub has no config.json of it"
