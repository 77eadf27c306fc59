"""What a recipe does before a training, where databases, data or a tiny model are missing, and behind it: its report.

The commands are in the config (`config/recipe.yaml`). A folder that they made keeps them, and is refused under others.
"""

from __future__ import annotations

import copy
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console

from verl_tool.errors import ConfigError, VerlToolError

TINY = "tiny"
MADE_BY = "made_by"
"""The file that tells by which commands its folder was made."""


class RecipeError(VerlToolError):
    """A command of a recipe failed."""


def tool_data_to_make(config: DictConfig) -> Path | None:
    """The folder that `make_tool_data` would make."""
    if config.recipe is None or config.recipe.tool_data is None or not config.recipe.make_tool_data:
        return None
    folder = Path(config.recipe.tool_data)
    return None if (folder / MADE_BY).exists() else folder


def make_tool_data(config: DictConfig, console: Console) -> bool:
    """Make what tools and reward manager of the config's recipe read (databases, an index), unless it is there: they
    are checked, and started, with it.

    Returns whether there was anything to make. Raises as `make_inputs`.
    """
    if config.recipe is None or config.recipe.tool_data is None:
        return False
    folder = Path(config.recipe.tool_data)
    return _make(config, folder, folder / MADE_BY, ("make_tool_data",), console)


def make_inputs(config: DictConfig, console: Console) -> bool:
    """Make data and model of the config's recipe, unless they are there. What the commands print goes to the console.

    Returns whether there was anything to make. Raises ConfigError if they are there and were made by other
    commands, and RecipeError if a command fails.
    """
    if config.recipe is None:
        return False
    data, model = Path(config.recipe.data), Path(config.run_dir) / "model"
    made = _make(config, data, data / "train.parquet", ("make_source", "make_data"), console)
    if config.recipe.model == TINY:
        made |= _make(config, model, model / "model.safetensors", ("make_model",), console)
    return made


def report(config: DictConfig) -> int:
    """Tell what came of the run, if it is a recipe's. The exit code of the report."""
    if config.recipe is None or config.recipe.report is None:
        return 0
    (command,) = commands(config, "report")
    return subprocess.run([sys.executable, *command]).returncode


def commands(config: DictConfig, *names: str) -> list[list[str]]:
    """The words of the commands in ``config.recipe``, a script first. A value is one word, or none if it is empty."""
    recipe = OmegaConf.to_container(config.recipe, resolve=False)
    assert isinstance(recipe, dict)  # a DictConfig gives a dict
    lines = [line for name in names for line in ([recipe[name]] if isinstance(recipe[name], str) else recipe[name])]
    # Split before values are put in: they may hold spaces.
    found = [OmegaConf.create(shlex.split(line), parent=config) for line in lines]
    return [[word for word in (_word(words, i) for i in range(len(words))) if word] for words in found]


def _word(words: ListConfig, i: int) -> str:
    value: object = words[i]
    if value is None:
        written = OmegaConf.to_container(words, resolve=False)
        assert isinstance(written, list)  # a ListConfig gives a list
        raise ConfigError(
            f"the recipe's command `{shlex.join(map(str, written))}` needs {written[i]}, which is null; set it, or "
            "name in the command what it stands for (TOOL_SERVER_URL sets tool_server.start=null)"
        )
    return f"[{','.join(map(str, value))}]" if isinstance(value, ListConfig) else str(value)


def _make(config: DictConfig, folder: Path, file: Path, names: Sequence[str], console: Console) -> bool:
    """Make `folder` by the commands of these names. It is there if `file` is."""
    made_by, unfinished = folder / MADE_BY, folder / f"{MADE_BY}.unfinished"
    now = _lines(_with_folders_named(config), names)
    if file.exists() and not unfinished.exists():
        was = made_by.read_text(encoding="utf-8") if made_by.exists() else now
        if was != now:
            raise ConfigError(
                f"{folder} was made by\n{was}and now it would be by\n{now}"
                "take another RUN or DATA, or delete that folder"
            )
        return False
    todo = commands(config, *names)
    if not todo:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(now, encoding="utf-8")
    for command in todo:
        code = subprocess.run([sys.executable, *command], stdout=console.file, stderr=console.file).returncode
        if code:
            raise RecipeError(f"`python {shlex.join(command)}` ended with exit code {code}; the lines above say why")
    requested = folder if file == made_by else file
    if not requested.exists() or os.listdir(folder) == [unfinished.name]:
        raise RecipeError(f"{' and '.join(names)} of the recipe ended without an error and made no {requested}")
    made_by.write_text(now, encoding="utf-8")
    unfinished.unlink(missing_ok=True)
    return True


def _lines(config: DictConfig, names: Sequence[str]) -> str:
    return "".join(f"{shlex.join(command)}\n" for command in commands(config, *names))


def _with_folders_named(config: DictConfig) -> DictConfig:
    """The config with names in place of its two folders, which may be told in another way next time."""
    named = copy.deepcopy(config)
    OmegaConf.update(named, "run_dir", "RUN")
    OmegaConf.update(named, "recipe.data", "DATA")
    return named
