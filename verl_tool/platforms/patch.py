"""Replacing one function of another package, and noticing when that function has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet

from verl_tool.errors import VerlToolError


class PatchError(VerlToolError, ImportError):
    """What a patch replaces is gone; the installed version is not one that it was written for."""


@dataclass(frozen=True)
class Patch:
    """One replacement. It takes effect when its module is imported, and costs nothing before."""

    distribution: str
    """The package as pip knows it."""
    versions: SpecifierSet
    """The versions that need it. Others are left alone."""
    module: str
    attribute: str
    why: str
    replace: Callable[[Any], Any]
    """Takes the original, returns what to put in its place."""

    def install(self) -> bool:
        """Arrange for the replacement. Returns whether the installed version needs it."""
        if not self.versions.contains(version(self.distribution), prereleases=True):
            return False
        wrapt.register_post_import_hook(self._apply, self.module)
        return True

    def _apply(self, module: ModuleType) -> None:
        try:
            original = vars(module)[self.attribute]
        except KeyError:
            raise PatchError(
                f"{self.distribution} {version(self.distribution)} has no {self.module}.{self.attribute}, which must "
                f"be replaced ({self.why}). Install a version that verl-tool is "
                "checked with: pip install 'verl-tool[cpu]'"
            ) from None
        setattr(module, self.attribute, self.replace(original))


def verl_patch(
    module: str, attribute: str, why: str, replace: Callable[[Any], Any], versions: str = ">=0.9.0"
) -> Patch:
    """A replacement in ``verl.{module}``."""
    return Patch("verl", SpecifierSet(versions), f"verl.{module}", attribute, why, replace)


def plain_class(actor: Any) -> Any:
    """The class that ``@ray.remote`` was put on: Ray's own wrapper cannot be subclassed."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__
