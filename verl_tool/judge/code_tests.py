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
import marshal
import math
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import Any

from verl_tool.sandbox_fusion import RunCodeResponse

_JUDGE = Path(__file__).parent / "inside"
_MODULES = (
    *("guard.py", "values.py", "link.py", "output_equality.py", "processes.py", "remote.py", "evaluation.py"),
    *("testcase.py", "judge.py"),
)
_PROGRAM = "import os, sys\nsys.path.insert(0, os.getcwd())\nimport judge\njudge.main()\n"
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
    __test__ = False

    tests: Sequence[str] = ()
    """Python texts, ``assert f(1) == 2`` say. Each finds the solution's global names."""
    programs: Sequence[tuple[str, str]] = ()
    """Stdin and expected stdout of the solution, run as a program."""
    setup: str = ""
    """Python text before each of `tests`: helper functions that the solution must not define for them."""
    calls: Sequence[TestCall] = ()
    strict: bool = False
    """Whether programs and functions that are called run without the imports and the recursion limit that graders of
    programming contests put before them, and programs must exit with 0 and print exactly what is expected."""

    @property
    def prelude(self) -> bool:
        """Whether the solution finds the usual imports made, as graders of programming contests have it."""
        return bool(self.calls or self.programs) and not self.strict

    def __len__(self) -> int:
        return len(self.tests) + len(self.calls) + len(self.programs)


@dataclass(frozen=True)
class JudgeVerdict:
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
    """One `JudgeVerdict` a test, in the order of the suite: the tests, then the calls, then the programs."""

    of: tuple[JudgeVerdict, ...]
    protected: bool
    """Whether the sandbox kept the solution's processes from looking into the judge."""

    @property
    def pass_rate(self) -> float:
        """Passed tests over all tests, 0 to 1."""
        return sum(verdict.passed for verdict in self.of) / len(self.of)

    @property
    def time_outs(self) -> int:
        return sum(verdict.reason in ("time", "budget") for verdict in self.of)

    @property
    def refused(self) -> int:
        """Tests that ask for what no plain data can answer: they fail whatever the solution is."""
        return sum(verdict.reason == "refused" for verdict in self.of)


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
        cls, solution: str, suite: TestSuite, test_seconds: float, total_seconds: float, max_display_chars: int = 0
    ) -> JudgeRun:
        """`test_seconds`: for one test, loading the solution included. `total_seconds`: for all. `max_display_chars`:
        most characters of all that verdicts tell as `seen`. Raises ValueError for an empty suite, which would pass
        whatever it is given."""
        if len(suite) == 0:
            raise ValueError("there is no test; a solution cannot be judged without one")
        token = secrets.token_hex(16)
        texts = [*suite.tests, *(call.test_of(solution) for call in suite.calls)]
        job = {
            "token": token,
            "solution": solution,
            "tests": [f"{suite.setup}\n{text}" for text in texts],
            "programs": [list(program) for program in suite.programs],
            "prelude": suite.prelude,
            "strict": suite.strict,
            "test_seconds": test_seconds,
            "total_seconds": total_seconds,
            "max_display_chars": max_display_chars,
        }
        return cls(_PROGRAM, json.dumps(job), _encoded_modules(), total_seconds + START_SECONDS, token, len(suite))

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
        missing = JudgeVerdict(False, "no verdict", f"the run ended: {ended}")
        return Verdicts(tuple(found.get(i, missing) for i in range(self.tests)), bool(lines[0]["protected"]))

    def _lines(self, stdout: str) -> list[dict[str, Any]]:
        marked = (line.partition(" ") for line in stdout.splitlines())
        # A run that is killed may leave half a line behind.
        return [json.loads(text) for token, _, text in marked if token == self.token and text.endswith("}")]


def _verdict(line: Mapping[str, Any]) -> JudgeVerdict:
    seen = tuple((name, value) for name, value in line.get("seen", ()))
    return JudgeVerdict(line["passed"], line["reason"], line["detail"], seen)


@lru_cache(maxsize=1)
def judge_modules() -> dict[str, bytes]:
    """The files that lie beside the judge's program: its modules, and what a sandbox with this Python need not compile
    at each run. Another one does."""
    sources = {name: (_JUDGE / name).read_bytes() for name in _MODULES}
    tag = sys.implementation.cache_tag
    return {**sources, **{f"__pycache__/{name[:-3]}.{tag}.pyc": _pyc(name, text) for name, text in sources.items()}}


def _pyc(name: str, source: bytes) -> bytes:
    """A module as Python's cache holds it, not to be compared with the file (PEP 552)."""
    unchecked = (1).to_bytes(4, "little")
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0))
    return MAGIC_NUMBER + unchecked + source_hash(source) + code


@lru_cache(maxsize=1)
def _encoded_modules() -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in judge_modules().items()}


def suite_in(given: Any, max_tests: int, strict: bool = False) -> TestSuite:
    """The tests in a problem's data, at most `max_tests` of them. `strict`: as of `TestSuite`.

    `given` is one of these, or its JSON text:

    - a list of Python texts with assertions;
    - ``{"tests": [...], "programs": [[stdin, stdout], ...], "setup": ""}``, with any of the first two and, or without,
      a text of helper functions that the tests use and the solution must not define for them;
    - ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of programs, each a text or a list of lines;
    - the same with ``"fn_name"``: arguments and values of a function, as APPS, TACO and LiveCodeBench have them;
    - ``{"input": [...], "output": [...]}``, as CodeContests has it;
    - a list of ``{"input": ..., "output": ...}``, with ``"testtype"`` (LiveCodeBench, DeepCoder: ``stdin`` or
      ``functional``) or ``"type"`` (PrimeIntellect: ``stdin_stdout`` or ``function_call``), or an object that has it as
      ``"test_cases"``. The function's name is there as ``"fn_name"``, or as ``"func_name"`` of the ``"metadata"``.

    Raises ValueError if it is none of them, holds no test, or one that cannot fail.
    """
    value = _decoded(given)
    if not isinstance(value, Mapping):
        value = _of_list(_listed(value))
    if "test_cases" in value:
        value = {**_of_list(_listed(_decoded(value["test_cases"])), value.get("fn_name")), **_without_cases(value)}
    tests = tuple(map(_test, _listed(value.get("tests"))))[:max_tests]
    calls, programs = _of_pairs(value if _is_pairs(value) else _decoded(value.get("inputs_outputs")))
    programs = [_pair(each) for each in _listed(value.get("programs"))] + programs
    calls = calls[: max_tests - len(tests)]
    programs = programs[: max_tests - len(tests) - len(calls)]
    if not (tests or calls or programs):
        raise ValueError("there is no test: neither 'tests' nor 'programs' nor 'inputs' and 'outputs'")
    return TestSuite(tests, tuple(programs), str(value.get("setup") or ""), tuple(calls), strict)


def _is_pairs(value: Mapping[str, Any]) -> bool:
    return any(name in value for name in ("inputs", "outputs", "input", "output"))


def _without_cases(value: Mapping[str, Any]) -> dict[str, Any]:
    """What else stands beside ``test_cases``: nothing that names tests."""
    return {name: value[name] for name in ("setup",) if name in value}


def _of_list(items: list[Any], function: Any = None) -> Mapping[str, Any]:
    """The object that says the same as a list of tests: of texts, of cases, or of one text that holds an object."""
    if len(items) == 1 and isinstance(items[0], str) and items[0].lstrip().startswith("{"):
        only = _decoded(items[0])
        return only if isinstance(only, Mapping) and not _is_case(only) else _of_cases([only], function)
    decoded = [_decoded(item) if isinstance(item, str) and item.lstrip().startswith("{") else item for item in items]
    return _of_cases(decoded, function) if any(isinstance(item, Mapping) for item in decoded) else {"tests": items}


def _is_case(item: Any) -> bool:
    return isinstance(item, Mapping) and "input" in item and "output" in item


_CALLED = {"functional": True, "function_call": True, "stdin": False, "stdin_stdout": False, "": False}
"""How a case is tested, by its ``testtype`` or ``type``."""


def _of_cases(cases: list[Any], function: Any) -> dict[str, Any]:
    """``inputs`` and ``outputs`` of a list of cases. Raises ValueError if one is of another form than the first."""
    unknown = next((case for case in cases if not _is_case(case)), None)
    if unknown is not None:
        raise ValueError(f"{str(unknown)[:80]!r} is no test: a case needs an 'input' and an 'output'")
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in cases}
    names = {str(name) for case in cases if (name := _function_of(case) or function)}
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError(f"the tests of one problem are of several kinds: {', '.join(sorted(kinds | names))}")
    kind = kinds.pop()
    if kind not in _CALLED:
        raise ValueError(f"testtype {kind[:80]!r} is unknown; known: {', '.join(filter(None, _CALLED))}")
    if _CALLED[kind] and not names:
        raise ValueError(f"tests of testtype {kind!r} name no function: 'fn_name', or 'func_name' of 'metadata'")
    named = names if _CALLED[kind] or (kind == "" and names) else set()
    pairs = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    return {**pairs, "fn_name": named.pop()} if named else pairs


def _function_of(case: Mapping[str, Any]) -> Any:
    metadata = _decoded(case.get("metadata") or {})
    return case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)


def _test(text: Any) -> str:
    """A Python text that may fail. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"a test is a Python text with assertions, not {str(text)[:80]!r}")
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text  # the judge says what is wrong with it
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes):
        raise ValueError(f"the test {text[:80]!r} cannot fail: it holds no assertion and calls nothing")
    return text


def _of_pairs(pairs: Any) -> tuple[list[TestCall], list[tuple[str, str]]]:
    """Calls, if there is a ``fn_name``, or programs."""
    if pairs is None:
        return [], []
    if not isinstance(pairs, Mapping):
        raise ValueError(f"{str(pairs)[:80]!r} stands where an object with 'inputs' and 'outputs' is due")
    inputs, outputs = (_listed(pairs.get(f"{name}s", pairs.get(name))) for name in ("input", "output"))
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} 'inputs' and {len(outputs)} 'outputs'; give one output an input")
    if pairs.get("fn_name"):
        return _calls(str(pairs["fn_name"]), inputs, outputs), []
    return [], [(_lines_of(stdin), _lines_of(stdout)) for stdin, stdout in zip(inputs, outputs, strict=True)]


def _pair(program: Any) -> tuple[str, str]:
    stdin, stdout = _listed(program)
    return _lines_of(stdin), _lines_of(stdout)


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
    """A text, or that of lines. Raises ValueError for what is neither, and would be written as Python writes it."""
    if isinstance(value, str | int | float):
        return str(value)
    lines = _listed(value)
    other = next((line for line in lines if not isinstance(line, str | int | float)), None)
    if other is not None:
        raise ValueError(f"{str(other)[:80]!r} stands where a line of stdin or stdout is due")
    return "\n".join(map(str, lines))


def _calls(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TestCall]:
    """A call for each input. If every output is a list of one item, that may be the value or hold it, as in APPS."""
    if not function.isidentifier() or keyword.iskeyword(function):
        raise ValueError(f"fn_name {function[:80]!r} is no name of a function")
    values = [
        _json_or_text(output) if isinstance(arguments, str) and isinstance(output, str) else output
        for arguments, output in zip(inputs, outputs, strict=True)
    ]
    wrapped = all(isinstance(value, list) and len(value) == 1 for value in values)
    return [
        TestCall(
            function,
            tuple(map(_literal, _arguments(arguments))),
            tuple(map(_literal, (value[0], value) if wrapped else (value,))),
        )
        for arguments, value in zip(inputs, values, strict=True)
    ]


def _arguments(given: Any) -> list[Any]:
    """A list of them; of a text a line of JSON each, or Python's own writing, or the text itself."""
    if not isinstance(given, str):
        return _with_whole_keys(_listed(given))
    try:
        return _with_whole_keys([json.loads(line) for line in given.splitlines() if line.strip()])
    except ValueError:
        pass
    try:
        return list(ast.literal_eval(f"[{given}]"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return [given]


def _with_whole_keys(arguments: list[Any]) -> list[Any]:
    """JSON has texts as keys only. As APPS and all that came of it do, those of a first argument are whole numbers if
    they can be."""
    first, *rest = arguments or [None]
    if not isinstance(first, Mapping):
        return arguments
    try:
        return [{int(key): value for key, value in first.items()}, *rest]
    except ValueError:
        return arguments


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _literal(value: Any) -> str:
    """A JSON value as Python writes it; NaN and the infinities, which have no literal, as ``1e999`` makes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "(1e999 - 1e999)" if math.isnan(value) else f"{'-' * (value < 0)}1e999"
    try:
        if isinstance(value, list | tuple) or type(value).__name__ == "ndarray":
            return f"[{', '.join(map(_literal, value))}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {_literal(item)}' for key, item in value.items())}}}"
        text = repr(value.item() if hasattr(value, "item") else value)
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"a {type(value).__name__} among the values is no plain JSON value") from error
    return text
