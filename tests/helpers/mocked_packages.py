"""Mocks of packages that are not installed, so that verl's code that imports them can run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Mocks(MetaPathFinder, Loader):
    """Finds and loads every module of a package as a mock."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        inside = name == self._package or name.startswith(f"{self._package}.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name, unsafe=True)
        module.__name__, module.__path__ = spec.name, []
        return module

    def exec_module(self, module: object) -> None: ...


def import_with_mocks(module: str, package: str, affected: Sequence[str]) -> ModuleType:
    """Import verl's `module`, with mocks of `package` unless that is installed.

    `affected` are prefixes of verl's modules that import the package. None of them stays imported with a mock in it.
    """
    if find_spec(package) is not None:
        return importlib.import_module(module)
    with _mocked(package, affected):
        return importlib.import_module(module)


@contextmanager
def _mocked(package: str, affected: Sequence[str]) -> Iterator[None]:
    finder, before = _Mocks(package), set(sys.modules)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name == package or name.startswith((f"{package}.", *affected)):
                del sys.modules[name]
