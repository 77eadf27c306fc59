"""Tests of a solution's code, run in a sandbox: what is run there and what comes back.

Many tests, one run. The solution runs in processes of its own inside that run, and the tests in a judge that it cannot
reach (`inside/`): it can neither read the tests or the expected outputs nor write a verdict, and it only ever hands
back plain values, which the judge compares. `assets/docs/judging.md` says what is and what is not protected.
"""

from __future__ import annotations

import ast
import base64
import json
import keyword
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_tool.sandbox_fusion import RunCodeResponse

_JUDGE = Path(__file__).parent / "inside"
_MODULES = ("guard.py", "values.py", "link.py", "processes.py", "remote.py", "evaluation.py", "testcase.py")
_EQUAL = "__judge_equal__"
"""The judge's own comparison of JSON values (`inside/testcase.py`)."""
START_SECONDS = 20.0
"""Added to the run's limit for the start and the end of the judge, seconds."""


@dataclass(frozen=True)
class TestCall:
    """A call of one of the solution's functions with JSON values."""

    __test__ = False  # pytest: this is no test class

    function: str
    arguments: tuple[str, ...]
    """As Python writes them."""
    expected: tuple[str, ...]
    """One of them is to come back. Lists and tuples are alike, as in JSON."""

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"

    def test_of(self, solution: str) -> str:
        """The test's text. A function that only a class ``Solution`` may have is called as a method of it."""
        is_method = not re.search(rf"^(async )?def {self.function}\b", solution, re.MULTILINE)
        owner = "Solution()." if is_method and re.search(r"^class Solution\b", solution, re.MULTILINE) else ""
        return f"assert {_EQUAL}({owner}{self}, {', '.join(self.expected)})"


@dataclass(frozen=True)
class TestSuite:
    """What a solution has to pass."""

    __test__ = False

    tests: Sequence[str] = ()
    """Python texts, ``assert f(1) == 2`` say. Each finds the solution's global names."""
    programs: Sequence[tuple[str, str]] = ()
    """Stdin and expected stdout of the solution, run as a program."""
    setup: str = ""
    """Python text before each of `tests`: helper functions that the solution must not define for them."""
    calls: Sequence[TestCall] = ()

    def __len__(self) -> int:
        return len(self.tests) + len(self.calls) + len(self.programs)


@dataclass(frozen=True)
class Verdict:
    """How one test ended."""

    passed: bool
    reason: str
    """``passed``; ``assertion``; ``output`` (of a program); ``error`` (raised); ``time``; ``ended`` (the solution's
    process died); ``load`` (the solution cannot be run at all); ``refused`` (the test compares or passes what is no
    plain data); ``budget`` (the time for all tests was over); ``no verdict`` (the run was killed before)."""
    detail: str = ""
    seen: tuple[tuple[str, str], ...] = ()
    """Of a test that failed, if that was asked for: parts of the assertion and their values; or ``stdout`` and
    ``stderr`` of the program. Each is cut."""


@dataclass(frozen=True)
class Verdicts:
    """One `Verdict` a test, in the order of the suite: the tests, then the calls, then the programs."""

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
    """One run of the judge: what to run in a sandbox or send to `/run_code`, and how to read its answer."""

    code: str
    stdin: str
    files: dict[str, str]
    """The judge's modules, base64; `judge_modules` has them as they are."""
    run_timeout: float
    """Seconds for all of it."""
    token: str
    """Starts every line that the judge prints; the solution never sees it."""
    tests: int

    @classmethod
    def of(
        cls, solution: str, suite: TestSuite, test_seconds: float, total_seconds: float, shown_chars: int = 0
    ) -> JudgeRun:
        """`test_seconds`: for one test, loading the solution included. `total_seconds`: for all. `shown_chars`:
        most characters of all that verdicts tell as `seen`.

        Raises ValueError for an empty suite, which would pass whatever it is given.
        """
        if len(suite) == 0:
            raise ValueError("there is no test; a solution cannot be judged without one")
        token = secrets.token_hex(16)
        texts = [*suite.tests, *(call.test_of(solution) for call in suite.calls)]
        job = {
            "token": token,
            "solution": solution,
            "tests": [f"{suite.setup}\n{text}" for text in texts],
            "programs": [list(program) for program in suite.programs],
            "test_seconds": test_seconds,
            "total_seconds": total_seconds,
            "shown_chars": shown_chars,
        }
        code, files = _program()
        return cls(code, json.dumps(job), files, total_seconds + START_SECONDS, token, len(suite))

    def verdicts(self, response: RunCodeResponse) -> Verdicts:
        """What the judge found, from the answer of `/run_code`. Raises NoVerdict as `read` does."""
        ran = response.run_result
        if response.status == "SandboxError" or ran is None:
            raise NoVerdict(f"the sandbox did not run the tests: {response.message}")
        return self.read(ran.stdout or "", ran.stderr or "", f"{ran.status}, exit code {ran.return_code}")

    def read(self, stdout: str, stderr: str, ended: str) -> Verdicts:
        """What the judge found, from what it wrote. Tests without a verdict (the run was killed) have failed.

        `ended`: how the run ended, in words. Raises NoVerdict if the judge had not begun: then no line of the solution
        was run either.
        """
        lines = self._lines(stdout)
        if not lines or not lines[0].get("ready"):
            raise NoVerdict(f"the judge did not start ({ended}): {stderr[-500:]}")
        found = {line["test"]: _verdict(line) for line in lines[1:]}
        missing = Verdict(False, "no verdict", f"the run ended: {ended}")
        return Verdicts(tuple(found.get(i, missing) for i in range(self.tests)), bool(lines[0]["protected"]))

    def _lines(self, stdout: str) -> list[dict[str, Any]]:
        marked = (line.partition(" ") for line in stdout.splitlines())
        # A run that is killed may leave half a line behind.
        return [json.loads(text) for token, _, text in marked if token == self.token and text.endswith("}")]


def _verdict(line: Mapping[str, Any]) -> Verdict:
    seen = tuple((name, value) for name, value in line.get("seen", ()))
    return Verdict(line["passed"], line["reason"], line["detail"], seen)


@lru_cache(maxsize=1)
def judge_modules() -> dict[str, bytes]:
    """The files that lie beside the judge's program."""
    return {name: (_JUDGE / name).read_bytes() for name in _MODULES}


@lru_cache(maxsize=1)
def _program() -> tuple[str, dict[str, str]]:
    """The judge's text and, base64, its modules."""
    files = {name: base64.b64encode(content).decode() for name, content in judge_modules().items()}
    return (_JUDGE / "judge.py").read_text(encoding="utf-8"), files


def suite_in(given: Any, max_tests: int) -> TestSuite:
    """The tests in a problem's data, at most `max_tests` of them.

    `given` is one of these, or its JSON text:

    - a list of Python texts with assertions;
    - ``{"tests": [...], "programs": [[stdin, stdout], ...], "setup": ""}``, with any of the first two and, or without,
      a text of helper functions that the tests use and the solution must not define for them;
    - ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of programs, each a text or a list of lines;
    - the same with ``"fn_name"``: arguments and values of a function, as APPS, TACO and LiveCodeBench have them.

    Raises ValueError if it is none of them, or holds no test.
    """
    value = _decoded(given)
    if not isinstance(value, Mapping):
        items = _listed(value)
        only = _decoded(items[0]) if len(items) == 1 and str(items[0]).lstrip().startswith("{") else None
        value = only if isinstance(only, Mapping) else {"tests": items}
    tests = tuple(map(str, _listed(value.get("tests"))))[:max_tests]
    calls, programs = _of_pairs(value if "inputs" in value else _decoded(value.get("inputs_outputs")))
    programs = [_pair(each) for each in _listed(value.get("programs"))] + programs
    calls = calls[: max_tests - len(tests)]
    programs = programs[: max_tests - len(tests) - len(calls)]
    if not (tests or calls or programs):
        raise ValueError("there is no test: neither 'tests' nor 'programs' nor 'inputs' and 'outputs'")
    return TestSuite(tests, tuple(programs), str(value.get("setup") or ""), tuple(calls))


def _of_pairs(pairs: Any) -> tuple[list[TestCall], list[tuple[str, str]]]:
    """Calls, if there is a ``fn_name``, or programs."""
    if pairs is None:
        return [], []
    if not isinstance(pairs, Mapping):
        raise ValueError(f"{str(pairs)[:80]!r} stands where an object with 'inputs' and 'outputs' is due")
    inputs, outputs = _listed(pairs.get("inputs")), _listed(pairs.get("outputs"))
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} 'inputs' and {len(outputs)} 'outputs'; give one output an input")
    if pairs.get("fn_name"):
        return _calls(str(pairs["fn_name"]), inputs, outputs), []
    return [], [(_lines_of(stdin), _lines_of(stdout)) for stdin, stdout in zip(inputs, outputs, strict=True)]


def _pair(program: Any) -> tuple[str, str]:
    stdin, stdout = _listed(program)
    return str(stdin), str(stdout)


def _decoded(value: Any) -> Any:
    """What a text holds as JSON, or a value that is no text. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{value[:80]!r} is no JSON: {error}") from error


def _listed(values: Any) -> list[Any]:
    """A list; parquet gives arrays of numpy, the truth of which is not defined. Raises ValueError."""
    if values is None:
        return []
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise ValueError(f"{str(values)[:80]!r} stands where a list is due")
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _lines_of(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float) else "\n".join(map(str, _listed(value)))


def _calls(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TestCall]:
    """A call for each input. If every output is a list of one item, that may be the value or hold it, as in APPS."""
    if not function.isidentifier() or keyword.iskeyword(function):
        raise ValueError(f"fn_name {function[:80]!r} is no name of a function")
    wanted = [
        _json_or_text(output) if isinstance(given, str) and isinstance(output, str) else output
        for given, output in zip(inputs, outputs, strict=True)
    ]
    wrapped = all(isinstance(value, list) and len(value) == 1 for value in wanted)
    return [
        TestCall(
            function,
            tuple(map(_literal, _arguments(given))),
            tuple(map(_literal, (value[0], value) if wrapped else (value,))),
        )
        for given, value in zip(inputs, wanted, strict=True)
    ]


def _arguments(given: Any) -> list[Any]:
    """A list of them; of a text a line of JSON each, or Python's own writing, or the text itself."""
    if not isinstance(given, str):
        return _listed(given)
    try:
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    except ValueError:
        pass
    try:
        return list(ast.literal_eval(f"[{given}]"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return [given]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _literal(value: Any) -> str:
    try:
        text = repr(value)
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"a {type(value).__name__} among the values is no plain JSON value") from error
    return text
