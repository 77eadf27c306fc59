"""Where tasks come from: a folder, or a git repository that is fetched for the time of its use."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl_tool.errors import ConfigError

_URL = re.compile(r"[a-z+]+://|[\w.-]+@[\w.-]+:")
_REGISTRY_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?@[\w.:-]+")
_SECONDS = 600.0
"""To fetch a repository."""


@contextlib.contextmanager
def open_source(source: str, *, subfolder: str = "", revision: str = "") -> Iterator[Path]:
    """Yield the folder of `source`, which exists until the end of the block.

    Args:
        source: a folder, the URL of a git repository, or the folder of a bare one (``tasks.git``).
        subfolder: of the tasks within it.
        revision: branch, tag or full commit hash of a repository.

    Raises ConfigError.
    """
    with contextlib.ExitStack() as stack:
        if _is_repository(source):
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-tool-tasks-")))
            _fetch(source, revision or "HEAD", root)
        elif revision:
            raise ConfigError(f"{source} is a folder, and --revision {revision} is of a git repository")
        else:
            root = Path(source)
        folder = root / subfolder
        if not folder.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"--subfolder {subfolder} is not in {source}")
        if not folder.is_dir():
            hint = ""
            if _REGISTRY_NAME.fullmatch(source):
                hint = "; names of Harbor's registry are not resolved here, give the URL of its git repository"
            raise ConfigError(f"there is no folder {subfolder or source}{f' in {source}' if subfolder else ''}{hint}")
        yield folder


def _environment() -> dict[str, str]:
    """The environment without what names another repository, as within a hook of git."""
    names = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
    return {name: value for name, value in os.environ.items() if name not in names}


def _is_repository(source: str) -> bool:
    folder = Path(source)
    return bool(_URL.match(source)) or ((folder / "HEAD").is_file() and (folder / "objects").is_dir())


def _fetch(source: str, revision: str, folder: Path) -> None:
    """Fetch one revision without its history."""
    address = source if _URL.match(source) else str(Path(source).resolve())
    for arguments in (
        ["init", "--quiet"],
        ["fetch", "--quiet", "--depth", "1", "--", address, revision],
        ["-c", "core.symlinks=true", "checkout", "--quiet", "FETCH_HEAD"],
    ):
        try:
            ran = subprocess.run(
                ["git", *arguments],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
                env={**_environment(), "GIT_TERMINAL_PROMPT": "0"},
            )
        except FileNotFoundError:
            raise ConfigError(f"{source} is a git repository, and git is not installed") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{source} was not fetched within {_SECONDS:g} s") from None
        if ran.returncode != 0:
            raise ConfigError(f"{source} at {revision} cannot be fetched: {ran.stderr.strip()[-1000:]}")
