"""What Hydra needs to compose a training's config: verl's own files, and arithmetic. Import it before composing.

And the known names, where a command line has one that the config does not.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tool.sandbox.backends.engine import find_engine

CALCULATIONS: dict[str, Callable[..., Any]] = {
    "engine": find_engine,
    "equal": lambda a, b: a == b,
    "if": lambda condition, then, otherwise="": then if condition else otherwise,
    "max": max,
    "not_zero": lambda a: a != 0,
    "product": lambda *factors: math.prod(factors),
    "quotient": lambda a, b: a // b,
    "sum": lambda *terms: sum(terms),
}
"""Resolvers: ``${calc.sum:${data.max_prompt_length},16}``. ``${calc.engine:}`` is the machine's container engine."""


class ConfigFolders(SearchPathPlugin):
    """Our files and verl's are found by a config that lies elsewhere: Hydra reads `hydra.searchpath` in no other."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add both. verl is not imported for it, which takes seconds."""
        search_path.append("verl_tool", f"file://{Path(__file__).parent / 'config'}")
        verl = importlib.util.find_spec("verl")
        for folder in (verl and verl.submodule_search_locations) or ():
            search_path.append("verl", f"file://{folder}/trainer/config")


Plugins.instance().register(ConfigFolders)
for _name, _function in CALCULATIONS.items():
    OmegaConf.register_new_resolver(f"calc.{_name}", _function, replace=True)


def resolve_calculations(config: DictConfig) -> None:
    """Put values in place of ``${calc.…}``: the processes that the config is sent to know no such resolvers."""
    for name, value in leaves(OmegaConf.to_container(config, resolve=False)).items():
        listed = isinstance(value, list)
        for place, text in [(f"{name}.{i}", text) for i, text in enumerate(value)] if listed else [(name, value)]:
            if isinstance(text, str) and "${calc." in text:
                OmegaConf.update(config, place, OmegaConf.select(config, place))


def leaves(content: Any, name: str = "") -> dict[str, Any]:
    """Settings by their dotted names; an empty group has none."""
    if not isinstance(content, dict):
        return {name: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= leaves(value, f"{name}.{key}" if name else str(key))
    return found


def known_names(error: BaseException | None) -> str | None:
    """The options that stand where a command line named one that does not exist; None for any other `error`.

    `error`: what Hydra raised, or what it was raised from.
    """
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__
    parent = getattr(error, "parent_node", None)
    if error is None or not isinstance(parent, DictConfig) or error.key in parent:
        return None
    names = sorted(map(str, parent))
    close = difflib.get_close_matches(str(error.key), names, 1)
    where = parent._get_full_key("") or "the config"
    guess = f", perhaps {close[0]} is meant" if close else ""
    return f"{where} has no option {str(error.key)!r}{guess}; known: {', '.join(names)}"
