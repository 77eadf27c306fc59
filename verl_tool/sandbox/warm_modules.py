"""Which modules the forkservers hold, and which forkserver suits a program.

A run that imports numpy or sympy itself pays 100 or 500 ms of CPU; a fork of what holds them already, 0.5 to 2 ms more
than a bare one. So forkservers come in *tiers*, each with more in it than the one before.
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
"""What a pool warms unless it is told otherwise; what is not installed is left out."""

_LOOKED_AT = 1 << 16
"""Bytes of a text that are searched for imports."""
_IMPORT = re.compile(rb"\bfrom[ \t]+([\w.]+)[ \t]+import\b|\bimport[ \t]+([\w., \t]+)")


def tiers_of(warm: Sequence[str], always: Sequence[str] = ()) -> tuple[Tier, ...]:
    """Tiers for the modules `warm`, smallest first, all of them with `always`.

    The first holds nothing else, the next what many programs import, then all of the standard library, the first module
    from elsewhere, and everything.
    """
    standard = [name for name in warm if _is_standard(name)]
    others = [name for name in warm if not _is_standard(name)]
    basic = [name for name in standard if name in _BASIC]
    kinds: tuple[list[str], ...] = ([], basic, standard, standard + others[:1], standard + others)
    return tuple(dict.fromkeys(tuple(dict.fromkeys((*always, *kind))) for kind in kinds))


def imported_by(text: bytes) -> set[str]:
    """Top-level names of the modules that a program's beginning seems to import."""
    names = set()
    for source, listed in _IMPORT.findall(text[:_LOOKED_AT]):
        for each in listed.split(b",") if listed else (source,):
            words = each.split()
            names.add(words[0].partition(b".")[0].decode() if words else "")
    return names - {""}


def suited_to(texts: Iterable[bytes], holds: Mapping[Tier, frozenset[str]]) -> Tier:
    """The smallest tier that holds what a program imports. A guess that spares time: all of them can import the same.

    `texts`: the program and its files. `holds`: for each tier, smallest first, the top-level names of what is in it.
    """
    *_, largest = holds
    elsewhere = {name for name in largest if not _is_standard(name)}
    imported: set[str] = set()
    for text in texts:
        imported |= imported_by(text) | {name for name in elsewhere if name.encode() in text}
    for tier, held in holds.items():
        if imported <= held:
            return tier
    # What none holds has imports of its own: some of them are in any tier but the bare one.
    known = imported & holds[largest]
    return next((tier for tier in list(holds)[1:] if known <= holds[tier]), largest)


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names
