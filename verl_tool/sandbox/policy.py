"""Rules for user code, in addition to the isolation."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from verl_tool.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    """Rules for user code, enforced by import and audit hooks in the run, not by an analysis of its source.

    They direct a model to the tools that it should use, with readable errors. They are no security boundary: code can
    circumvent them, and is then still confined by the isolation.
    """

    allowed_modules: tuple[str, ...] | None = None
    """Top-level modules that user code may import, None for all. An allowed library may import whatever it needs."""
    restricted_functions: tuple[str, ...] = ()
    """Functions that user code may not call: builtins (``eval``) and dotted names (``os.system``)."""
    pre_import: tuple[str, ...] = ()
    """Import statements (``import numpy as np``) or bare module names, run before the user's code in its namespace."""

    def __post_init__(self) -> None:
        """Raise ConfigError if an entry is not a name or not an import statement."""
        object.__setattr__(self, "pre_import", tuple(_import_statement(entry) for entry in self.pre_import))
        for name in (*(self.allowed_modules or ()), *self.restricted_functions):
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(f"policy entry {name!r} is not a (dotted) Python name, as 'math' or 'os.system'")

    @property
    def pre_imported_modules(self) -> tuple[str, ...]:
        """The modules that `pre_import` names, for warming."""
        names: list[str] = []
        for statement in self.pre_import:
            for node in ast.parse(statement).body:
                if isinstance(node, ast.Import):
                    names += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names.append(node.module or "")
        return tuple(names)


def _import_statement(entry: str) -> str:
    statement = entry.strip()
    if all(part.isidentifier() for part in statement.split(".")):
        statement = f"import {statement}"
    try:
        body = ast.parse(statement).body
    except SyntaxError:
        body = []
    if not body or not all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body):
        raise ConfigError(
            f"pre_import entry {entry!r} is not an import statement; write 'import numpy as np' or 'numpy'"
        )
    if any(isinstance(node, ast.ImportFrom) and node.level for node in body):
        raise ConfigError(f"pre_import entry {entry!r} is a relative import; name the module in full")
    return statement
