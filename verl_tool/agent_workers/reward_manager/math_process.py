"""Compares mathematical answers with math-verify, in a process that can be killed. Run as a program.

One line of JSON a question, ``{"gold": latex, "answer": latex}``; one line an answer, ``{"equal": bool}``.
Only math-verify's LaTeX grammar reads the answer (ANTLR): its plain-expression reader goes through sympy's
`parse_expr`, which evaluates text as Python. Nothing of verl-tool is imported here, so that the process starts fast.
"""

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

MEMORY_BYTES = 4 << 30
"""Address space: ``9^{9^{9^9}}`` runs into a MemoryError and not into the machine's memory."""
_PR_SET_PDEATHSIG = 1
_READERS = (LatexExtractionConfig(boxed_match_priority=0),)


def compare(gold: str, answer: str) -> dict[str, bool]:
    """Whether the two are equal."""
    wanted, given = (_parsed(text) for text in (gold, answer))
    # math-verify's own time limits are signals, which would only end what Python sees; the caller kills instead.
    equal = bool(wanted) and verify(wanted, given, timeout_seconds=None)
    return {"equal": bool(equal)}


def _parsed(text: str) -> list:
    return parse(f"\\boxed{{{text}}}", _READERS, parsing_timeout=None)


def main() -> None:
    """Answer until stdin ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        compare("1", "1")
        for line in sys.stdin:
            answers.write(json.dumps(compare(**json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
