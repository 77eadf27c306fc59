"""Importing a user's own file, named by its path."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from verl_tool.errors import ConfigError


def import_file(path: Path) -> ModuleType:
    """The module in the file; imported once a process.

    Raises ConfigError if there is no such file or it cannot be imported.
    """
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        raise ConfigError(f"there is no file {resolved}; give the path of a Python file")
    name = f"verl_tool_user_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{resolved} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises, the user must hear which file it was
        del sys.modules[name]
        raise ConfigError(f"{resolved} cannot be imported: {type(error).__name__}: {error}") from error
    return module
