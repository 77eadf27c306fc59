"""Compare mathematical answers with math-verify, as a program in a process that can be killed.

Each line of stdin is a question, ``{"gold": latex, "answer": latex}``. The answer has two lines. ``{"gold": true}``
says that the gold answer was read, so that a later crash is due to the other answer. ``{"equal": bool, "worn": bool}``
is the result, where `worn` means that the process should be replaced: the comparison failed or used much memory.

The answer is parsed by math-verify's LaTeX grammar (ANTLR) only. Its parser of plain expressions uses sympy's
`parse_expr`, which evaluates text as Python. Only `math_text` of verl-tool is imported, so that the process starts
fast.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, MatrixBase

if __name__ == "__main__":  # run as a program, for which verl-tool may not be importable
    sys.path.append(str(Path(__file__).parents[4]))

from verl_tool.agent_workers.reward_manager.grading.math_text import (
    MAX_ITEMS,
    MODIFIER,
    MathForm,
    compact,
    form,
    is_relation,
    same_unit,
    scale,
    spell,
    tokens,
    without_name,
    without_unit,
    words,
)

MEMORY_BYTES = 4 << 30
"""Maximum address space, so that ``9^{9^{9^9}}`` raises MemoryError before the machine's memory is exhausted."""
WORN_KILOBYTES = 1 << 20
"""Resident memory above which the process should be replaced."""
SMALL, NEAR = 1e-3, 2e-3
"""A number smaller than `SMALL` is compared by its ratio to the right one, which may differ from 1 by `NEAR`."""
_NAMES = re.compile(r"[A-Za-z]{3}")
"""A word, around which blanks have no meaning."""
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*percent\s*\})\s*$")
"""A unit that may be left out: ``50\\%`` is 50 and never 0.5."""
_SHORT_WORDS = "am an as at be by do go he if in is it me my no of ok on so to up us we"
_WORD = re.compile(
    r"(?:\\(?:text|mathrm|textbf|mathbf)\s*)?\{?\s*([A-Za-z][A-Za-z ]{2,}|[LCDM]?[IVX][IVXLCDM]|[LCDM][IVX]|"
    r"[LCD]M|M[LCD]|NO|ON|" + "|".join(f"{word}|{word.capitalize()}" for word in _SHORT_WORDS.split()) + r")\s*\}?"
)
"""A word or a Roman numeral, whose letters are not factors."""
_POINTS = re.compile(r"(?:[A-Z]'*){2,}")
"""A name in capitals. The segment AB equals BA, but ``\\text{AB}`` and A'B' have a fixed order."""
_UNITS_TOO = ("K", "M")
"""Kelvin and mol per litre. An answer may leave them out, but one that adds them may mean thousands or millions."""
_VARIABLES = re.compile(r"(?<=[0-9}])(?!(?:st|nd|rd|th)$)([A-Za-hj-z]{1,2})$")
"""Variables after a number. math-verify would read ``3+2h`` as 5 hours, and ``2ab`` as 2."""
_SEVERAL = re.compile(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\s\|\s|[,;]\s|\\pm")
"""Separators of several answers."""
_PR_SET_PDEATHSIG = 1
_READERS = (LatexExtractionConfig(boxed_match_priority=0),)


def compare(gold: str, answer: str, gold_is_read: Callable[[], None] = lambda: None) -> bool:
    """Return whether two answers are equal: as text, as values, or item by item as lists, tuples, sets and unions."""
    gold, answer = spell(gold), spell(answer)
    _parse(_PERCENT.sub("", gold))
    gold_is_read()
    return _equal(gold, answer)


def _equal(gold: str, answer: str) -> bool:
    if answer and (tokens(gold) == tokens(answer) or (_NAMES.search(gold) and words(gold) == words(answer))):
        return True
    gold_form, answer_form = form(gold), form(answer)
    if gold_form.kind != answer_form.kind and without_name(answer) != answer:
        return _equal(gold, without_name(answer))
    several = ("list", "set")
    if _is_bracketed_list(answer_form) and gold_form.kind in several:
        return _equal_items(gold_form, answer_form)
    if _is_bracketed_list(gold_form) and answer_form.kind in several:
        return _equal_items(gold_form, answer_form)
    if answer_form.kind == "list" and gold_form.kind == "tuple":  # a tuple without its brackets
        return gold_form.brackets == "()" and _equal_items(gold_form, answer_form, ordered=True)
    if "list" in (gold_form.kind, answer_form.kind):
        return gold_form.kind in several and answer_form.kind in several and _equal_items(gold_form, answer_form)
    if gold_form.kind == answer_form.kind == "tuple":
        return gold_form.brackets == answer_form.brackets and _equal_items(gold_form, answer_form, ordered=True)
    if gold_form.kind == answer_form.kind != "value":
        return _equal_items(gold_form, answer_form)
    if {gold_form.kind, answer_form.kind} == {"tuple", "set"}:
        return False
    return _equal_values(gold, answer)


def _is_bracketed_list(part: MathForm) -> bool:
    """Return whether it is a list such as ``[1, 2, 3]``, which has too many items for an interval."""
    return part.kind == "tuple" and part.brackets == "[]" and len(part.items) > 2


def _equal_items(gold: MathForm, answer: MathForm, ordered: bool = False) -> bool:
    """Return whether the items of both are equal, in any order unless `ordered`."""
    if len(gold.items) != len(answer.items) or len(gold.items) > MAX_ITEMS:
        return False
    left = list(answer.items)
    for item in gold.items:
        places = range(1) if ordered else range(len(left))
        at = next((i for i in places if _equal_item(item, left[i])), None)
        if at is None:
            return False
        del left[at]
    return True


def _equal_item(gold: str, answer: str) -> bool:
    return _equal(gold, answer) or (
        "=" not in gold and without_name(answer) != answer and _equal(gold, without_name(answer))
    )


def _equal_values(gold: str, answer: str) -> bool:
    word = _WORD.fullmatch(gold.strip())
    if word:  # math-verify reads a word as a product of letters: "on" is "no"
        answered = _WORD.fullmatch(answer.strip())
        return answered is not None and answered[1].casefold().split() == word[1].casefold().split()
    names = [re.sub(r"\\text(?![a-z])|[\s{}]", "", text) for text in (gold, answer)]
    if _POINTS.fullmatch(names[0]) and (names[0] != gold or "'" in gold) and _POINTS.fullmatch(names[1]):
        return names[0] == names[1]
    if "=" not in answer and is_relation(gold):
        return False
    if "=" not in gold:
        answer = without_name(answer)
    elif "=" not in answer:
        gold = without_name(gold)
    scales = scale(gold), scale(answer)
    (gold, unit), (answer, other) = without_unit(gold), without_unit(answer)
    if unit and other and not same_unit(unit, other):
        return False
    if scales[0] != scales[1] and not unit == other != "" and (scales[1] or scales[0] not in _UNITS_TOO):
        return False
    gold, answer = compact(gold), compact(answer)
    if gold == answer and gold:
        return True
    gold_value = _parse(_PERCENT.sub("", gold))
    if not gold_value or not _may_stand_for(gold, answer):
        return False
    sides = [_parse(_PERCENT.sub("", side)) for side in _sides(gold, answer)]
    # math-verify's time limits use signals, which interrupt Python code only. Instead, the caller kills the process.
    return all(
        verify(gold_value, side, timeout_seconds=None) and _has_small_numbers(gold_value, side) for side in sides
    )


def _has_small_numbers(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether the answer has, for each number of the gold answer below `SMALL`, one of nearly the same size.

    math-verify rounds to six decimals, so that all such numbers may be equal to it.
    """
    numbers = [part for part in _parts(answer[0]) if _is_number(part)]
    small = [part for part in _parts(gold[0]) if _is_number(part) and 0 < abs(part.evalf(3)) < SMALL]
    return all(any(abs((other / part).evalf() - 1) < NEAR for other in numbers) for part in small)


def _parts(value: Any) -> list[Any]:
    """Return the parts of a tuple, set, interval, equation or matrix, or an expression itself."""
    if isinstance(value, MatrixBase):
        return list(value.flat())
    return [value] if isinstance(value, Expr) else [*getattr(value, "args", ())]


def _is_number(part: object) -> bool:
    return isinstance(part, Expr) and bool(part.is_number and part.is_real)


_SIGN_BEFORE = re.compile(r"\s*(?:[<>]=?|\\(?:approx|sim|simeq|le|ge|lt|gt|ne|not)(?![a-z]))")
"""Sign of a relation without a left side, which math-verify drops before a fraction: ``> \\frac{3}{4}``."""
_BASE = re.compile(r"[0-9]\}?\s*_\s*\{?\s*(\w+)")
"""Base of a number, as an index."""


def _may_stand_for(gold: str, answer: str) -> bool:
    """Return whether math-verify may compare these answers.

    False where it would drop a part: the index of a number (``7_2``), or all but one of several answers (``3 | 7``, ``3
    (or 7)``).
    """
    if [word.lower() for word in MODIFIER.findall(gold)] != [word.lower() for word in MODIFIER.findall(answer)]:
        return False
    base, other = (_BASE.search(text) for text in (gold, answer))
    if other and other[1] != (base[1] if base else "10"):
        return False
    bars = [text.replace("\\mid", "|").count("|") % 2 for text in (gold, answer)]
    if bars[1] and not bars[0]:  # a single bar separates several answers
        return False
    signs = [_SIGN_BEFORE.match(text) for text in (gold, answer)]
    if signs[1] and not (signs[0] and signs[0][0] == signs[1][0]):
        return False
    if ";" in answer and ";" not in gold:
        return False
    return bool(_SEVERAL.search(gold)) or not _SEVERAL.search(answer)


def _sides(gold: str, answer: str) -> list[str]:
    """Return the parts of the answer that must equal the gold answer.

    For an equation such as ``8=7``, of which math-verify reads the last side, these are also all sides without letters.
    """
    if "=" in gold or not re.fullmatch(r"[^<>]*[^<>=!]=[^<>=]*", answer.replace("\\neq", "<")):
        return [answer]
    numbers = [
        side for side in answer.split("=") if side.strip() and not re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", side))
    ]
    return [answer, *numbers]


def _parse(text: str) -> list:
    text = _VARIABLES.sub(r"{\1}", text)
    return parse(f"\\boxed{{{text}}}", _READERS, parsing_timeout=None)


def main() -> None:
    """Answer questions until stdin ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        compare("1", "1")
        for line in sys.stdin:
            _answer(json.loads(line), answers)


def _answer(question: dict[str, str], answers: TextIO) -> None:
    def send(**fields: bool) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        equal = compare(question["gold"], question["answer"], lambda: send(gold=True))
        send(equal=equal, worn=_peak_kilobytes() > WORN_KILOBYTES)
    except Exception:  # noqa: BLE001  sympy may raise anything, for example for lack of memory or too deep nesting
        send(equal=False, worn=True)


def _peak_kilobytes() -> int:
    """Return the peak of resident memory. `ru_maxrss` would include that of the process before the exec."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
