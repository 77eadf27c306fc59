"""Choose the modules that forkservers import in advance, and the forkserver for a program.

A run that imports numpy or sympy itself needs 100 or 500 ms of CPU time. Forking a process that has imported them takes
only 0.5 to 2 ms longer than forking a bare one. Therefore there are several kinds of forkservers (*tiers*), each with
more modules than the one before.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

Tier = tuple[str, ...]
"""The modules that a kind of forkserver imports before its first run."""

_BASIC = (
    *("bisect", "collections", "contextlib", "copy", "enum", "functools", "heapq", "itertools", "operator", "re"),
    *("string", "typing"),
)
_STANDARD = ("dataclasses", "datetime", "decimal", "fractions", "json", "random", "statistics", "threading")
WARM_MODULES = (*_BASIC, *_STANDARD, "numpy", "sympy")
"""Default of a pool. Modules that are not installed are skipped."""

_SEARCHED_BYTES = 1 << 16
"""Number of bytes of a text that are searched for imports."""
_IMPORT = re.compile(rb"\bfrom[ \t]+([\w.]+)[ \t]+import\b|\bimport[ \t]+([\w., \t]+)")


def tiers_of(warm: Sequence[str], always: Sequence[str] = ()) -> tuple[Tier, ...]:
    """Divide the modules `warm` into tiers, smallest first. Each tier contains `always`.

    The first tier contains nothing else. The second adds common modules, the third the rest of the standard library,
    the fourth the first other module, and the last everything.
    """
    standard = [name for name in warm if _is_standard(name)]
    others = [name for name in warm if not _is_standard(name)]
    basic = [name for name in standard if name in _BASIC]
    kinds: tuple[list[str], ...] = ([], basic, standard, standard + others[:1], standard + others)
    return tuple(dict.fromkeys(tuple(dict.fromkeys((*always, *kind))) for kind in kinds))


def imported_by(text: bytes) -> set[str]:
    """Return the top-level names of the modules that the beginning of a program appears to import."""
    names = set()
    for source, listed in _IMPORT.findall(text[:_SEARCHED_BYTES]):
        for each in listed.split(b",") if listed else (source,):
            words = each.split()
            names.add(words[0].partition(b".")[0].decode() if words else "")
    return names - {""}


def choose_tier(texts: Iterable[bytes], modules_by_tier: Mapping[Tier, frozenset[str]]) -> Tier:
    """Return the smallest tier that contains what a program imports.

    A wrong guess costs only time, since a program can import anything in any tier. `texts` are the program and its
    files. `modules_by_tier` lists, for each tier from the smallest, the top-level names of the modules in it.
    """
    *_, largest = modules_by_tier
    third_party = {name for name in largest if not _is_standard(name)}
    imported: set[str] = set()
    for text in texts:
        imported |= imported_by(text) | {name for name in third_party if name.encode() in text}
    for tier, modules in modules_by_tier.items():
        if imported <= modules:
            return tier
    # A module that is in no tier imports common modules itself, so that the bare tier is never the best.
    known = imported & modules_by_tier[largest]
    return next((tier for tier in list(modules_by_tier)[1:] if known <= modules_by_tier[tier]), largest)


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names
