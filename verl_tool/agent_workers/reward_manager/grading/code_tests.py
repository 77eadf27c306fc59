"""Tests of a solution's code, run in the tool server's sandbox: what is sent to `/run_code` and what comes back.

Many tests, one run. The solution runs in processes of its own inside that run, and the tests in a judge that it cannot
reach (`judge/`): it can neither read the tests or the expected outputs nor write a verdict, and it only ever hands back
plain values, which the judge compares. `assets/docs/judging.md` says what is and what is not protected.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_tool.sandbox_fusion import RunCodeResponse

_JUDGE = Path(__file__).parents[1] / "judge"
_MODULES = ("guard.py", "values.py", "link.py", "processes.py", "remote.py", "testcase.py")
START_SECONDS = 20.0
"""Added to the run's limit for the start and the end of the judge, seconds."""


@dataclass(frozen=True)
class TestSuite:
    """What a solution has to pass."""

    __test__ = False  # pytest: this is no test class

    tests: Sequence[str] = ()
    """Python texts, ``assert f(1) == 2`` say. Each finds the solution's global names."""
    programs: Sequence[tuple[str, str]] = ()
    """Stdin and expected stdout of the solution, run as a program."""
    setup: str = ""
    """Python text before each of `tests`: helper functions that the solution must not define for them."""

    def __len__(self) -> int:
        return len(self.tests) + len(self.programs)


@dataclass(frozen=True)
class Verdict:
    """How one test ended."""

    passed: bool
    reason: str
    """``passed``; ``assertion``; ``output`` (of a program); ``error`` (raised); ``time``; ``ended`` (the solution's
    process died); ``load`` (the solution cannot be run at all); ``refused`` (the test compares or passes what is no
    plain data); ``budget`` (the time for all tests was over); ``no verdict`` (the run was killed before)."""
    detail: str = ""


@dataclass(frozen=True)
class Verdicts:
    """One `Verdict` a test, in the order of the suite: the tests, then the programs."""

    of: tuple[Verdict, ...]
    protected: bool
    """Whether the sandbox kept the solution's processes from looking into the judge."""

    @property
    def pass_rate(self) -> float:
        """Passed tests over all tests, 0 to 1."""
        return sum(verdict.passed for verdict in self.of) / len(self.of)

    @property
    def time_outs(self) -> int:
        """Tests that were not over in time."""
        return sum(verdict.reason in ("time", "budget") for verdict in self.of)


class NoVerdict(Exception):
    """The judge did not run: the infrastructure is to blame, not the solution."""


@dataclass(frozen=True)
class JudgeRun:
    """One run of the judge: what to send to `/run_code`, and how to read its answer."""

    code: str
    stdin: str
    files: dict[str, str]
    """The judge's modules, base64."""
    run_timeout: float
    """Seconds for all of it."""
    token: str
    """Starts every line that the judge prints; the solution never sees it."""
    tests: int

    @classmethod
    def of(cls, solution: str, suite: TestSuite, test_seconds: float, total_seconds: float) -> JudgeRun:
        """`test_seconds`: for one test, loading the solution included. `total_seconds`: for all.

        Raises ValueError for an empty suite, which would pass whatever it is given.
        """
        if len(suite) == 0:
            raise ValueError("there is no test; a solution cannot be judged without one")
        token = secrets.token_hex(16)
        job = {
            "token": token,
            "solution": solution,
            "tests": [f"{suite.setup}\n{test}" for test in suite.tests],
            "programs": [list(program) for program in suite.programs],
            "test_seconds": test_seconds,
            "total_seconds": total_seconds,
        }
        code, files = _program()
        return cls(code, json.dumps(job), files, total_seconds + START_SECONDS, token, len(suite))

    def verdicts(self, response: RunCodeResponse) -> Verdicts:
        """What the judge found. Tests without a verdict (the run was killed) have failed.

        Raises NoVerdict if the judge had not begun: then no line of the solution was run either.
        """
        ran = response.run_result
        if response.status == "SandboxError" or ran is None:
            raise NoVerdict(f"the sandbox did not run the tests: {response.message}")
        lines = self._lines(ran.stdout or "")
        if not lines or not lines[0].get("ready"):
            raise NoVerdict(
                f"the judge did not start ({ran.status}, exit code {ran.return_code}): {(ran.stderr or '')[-500:]}"
            )
        found = {line["test"]: Verdict(line["passed"], line["reason"], line["detail"]) for line in lines[1:]}
        missing = Verdict(False, "no verdict", f"the run ended: {ran.status}, exit code {ran.return_code}")
        return Verdicts(tuple(found.get(i, missing) for i in range(self.tests)), bool(lines[0]["protected"]))

    def _lines(self, stdout: str) -> list[dict[str, Any]]:
        marked = (line.partition(" ") for line in stdout.splitlines())
        # A run that is killed may leave half a line behind.
        return [json.loads(text) for token, _, text in marked if token == self.token and text.endswith("}")]


@lru_cache(maxsize=1)
def _program() -> tuple[str, dict[str, str]]:
    """The judge's text and, base64, its modules."""
    files = {name: base64.b64encode((_JUDGE / name).read_bytes()).decode() for name in _MODULES}
    return (_JUDGE / "judge.py").read_text(encoding="utf-8"), files
