"""Replacing one function of another package, and noticing when that function has changed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet

from verl_tool.errors import VerlToolError

REMEDY = (
    "install the versions that verl-tool is checked with: source scripts/env.sh cpu, or on a machine with GPUs "
    "source scripts/env.sh gpu"
)


class PatchError(VerlToolError, ImportError):
    """What a patch replaces is gone; the installed version is not one that it was written for."""


@dataclass(frozen=True)
class Internal:
    """Something inside another package that our code replaces, or writes into."""

    distribution: str
    """The package as pip knows it."""
    versions: SpecifierSet
    """The versions that our code was written for, none of them later than those that were tried."""
    module: str
    attribute: str
    why: str

    def is_installed(self) -> bool:
        """Whether the package is there, in whichever version."""
        try:
            version(self.distribution)
        except PackageNotFoundError:
            return False
        return True

    def problem(self) -> str | None:
        """What stands in the way with the installed version, and the remedy; None if nothing does.

        Reads source files and imports nothing. A package that is not installed is in nobody's way.
        """
        if not self.is_installed():
            return None
        found = version(self.distribution)
        if not self.versions.contains(found, prereleases=True):
            return (
                f"{self.distribution} {found} is installed, and verl-tool's replacement of {self.module}."
                f"{self.attribute} is written for {self.distribution} {self.versions} ({self.why}); {REMEDY}"
            )
        names = _names_in(self.module)
        if names is None or not names & {self.attribute, "*"}:
            return self.missing()
        return None

    def missing(self) -> str:
        """What to say where the installed version has it no longer."""
        return (
            f"{self.distribution} {version(self.distribution)} has no {self.module}.{self.attribute}, which must be "
            f"replaced ({self.why}); {REMEDY}"
        )


@dataclass(frozen=True)
class Patch(Internal):
    """One replacement. It takes effect when its module is imported, and costs nothing before."""

    replace: Callable[[Any], Any]
    """Takes the original, returns what to put in its place."""
    not_needed: SpecifierSet | None = None
    """The versions that are known to do without."""

    def install(self) -> bool:
        """Arrange for the replacement. Returns whether it is written for the installed version; see `check_patches`."""
        if not self.is_installed() or not self.versions.contains(version(self.distribution), prereleases=True):
            return False
        wrapt.register_post_import_hook(self._apply, self.module)
        return True

    def problem(self) -> str | None:
        """As of `Internal`."""
        if self.not_needed is not None and self.is_installed():
            found = version(self.distribution)
            if self.not_needed.contains(found, prereleases=True):
                return None
        return super().problem()

    def _apply(self, module: ModuleType) -> None:
        try:
            original = vars(module)[self.attribute]
        except KeyError:
            raise PatchError(self.missing()) from None
        setattr(module, self.attribute, self.replace(original))


def verl_patch(
    module: str,
    attribute: str,
    why: str,
    replace: Callable[[Any], Any],
    versions: str = ">=0.9.0,<0.9.2",
    not_needed: str | None = None,
) -> Patch:
    """A replacement in ``verl.{module}``."""
    spared = None if not_needed is None else SpecifierSet(not_needed)
    return Patch("verl", SpecifierSet(versions), f"verl.{module}", attribute, why, replace, spared)


def check_patches(internals: Sequence[Internal]) -> None:
    """Raises PatchError that names all that the installed versions lack of `internals`."""
    problems = list(dict.fromkeys(problem for each in internals if (problem := each.problem())))
    if problems:
        raise PatchError("\n       ".join(problems))


def plain_class(actor: Any) -> Any:
    """The class that ``@ray.remote`` was put on: Ray's own wrapper cannot be subclassed."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__


@cache
def _names_in(module: str) -> frozenset[str] | None:
    """The names that a module's source gives to something; None if there is no such module."""
    top, *parts = module.split(".")
    spec = find_spec(top)
    if spec is None:
        return None
    if not parts:
        path = Path(spec.origin or "")
    else:
        path = Path(next(iter(spec.submodule_search_locations or ()), "")).joinpath(*parts)
        path = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    if not path.is_file():
        return None
    return frozenset(_assigned(ast.parse(path.read_bytes()).body))


def _assigned(body: Sequence[ast.AST]) -> Iterator[str]:
    """Names that statements of a module give to something, those in blocks (``if``, ``try``) included."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name.asname or name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _assigned(list(ast.iter_child_nodes(node)))
