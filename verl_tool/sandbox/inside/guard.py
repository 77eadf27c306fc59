"""The policy inside a run (see `verl_tool.sandbox.policy`)."""

from __future__ import annotations

import types


class Guard:
    """Holds user code to the policy. It steers a model; it is no wall (the isolation is)."""

    def __init__(
        self, allowed_modules: list[str] | None, restricted_functions: list[str], pre_import: list[str]
    ) -> None:
        self._allowed = None if allowed_modules is None else frozenset(allowed_modules)
        self._restricted = tuple(restricted_functions)
        self._pre_import = tuple(pre_import)

    def activate(self, main: types.ModuleType) -> None:
        """Bind the user's program, whose main module this is, to the policy."""
        for statement in self._pre_import:
            exec(statement, main.__dict__)
