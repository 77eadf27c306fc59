"""Test a solution's code in a sandbox: build the run, and read its verdicts.

All tests of a solution run in one sandbox run. The solution runs in processes of its own, and the tests in a judge that
it cannot reach (`inside/`). It cannot read the tests or the expected outputs, or write a verdict. It only returns plain
values, which the judge compares. `assets/docs/judging.md` says what is and what is not protected.
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
"""Name of the judge's comparison of JSON values (`inside/testcase.py`)."""
START_SECONDS = 20.0
"""Seconds for the start and the end of the judge, in addition to the limit of all tests."""


@dataclass(frozen=True)
class TestCall:
    """A call of one of the solution's functions with JSON values."""

    __test__ = False  # not a test class of pytest

    function: str
    arguments: tuple[str, ...]
    """Arguments as Python literals."""
    expected: tuple[str, ...]
    """Accepted results as Python literals. Lists and tuples are equal, as in JSON."""

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"

    def test_of(self, solution: str) -> str:
        """Return the test as Python text. A function that is not at the top level is a method of ``Solution``."""
        is_method = not re.search(rf"^(async )?def {self.function}\b", solution, re.MULTILINE)
        owner = "Solution()." if is_method and re.search(r"^class Solution\b", solution, re.MULTILINE) else ""
        return f"assert {_EQUAL}({owner}{self}, {', '.join(self.expected)})"


@dataclass(frozen=True)
class TestSuite:
    """The tests of one problem."""

    __test__ = False

    tests: Sequence[str] = ()
    """Python texts, for example ``assert f(1) == 2``. Each can use the solution's global names."""
    programs: Sequence[tuple[str, str]] = ()
    """Stdin and expected stdout of the solution, which is run as a program."""
    setup: str = ""
    """Python text to run before each of `tests`: helper functions that the solution cannot replace."""
    calls: Sequence[TestCall] = ()
    strict: bool = False
    """Whether programs and called functions run without the usual imports and recursion limit of graders of programming
    contests, and programs must exit with code 0 and print exactly the expected output."""

    @property
    def prelude(self) -> bool:
        """Whether the usual imports are made before the solution, as graders of programming contests do."""
        return bool(self.calls or self.programs) and not self.strict

    def __len__(self) -> int:
        return len(self.tests) + len(self.calls) + len(self.programs)


@dataclass(frozen=True)
class JudgeVerdict:
    """The result of one test."""

    passed: bool
    reason: str
    """``passed``; ``assertion``; ``output`` (of a program); ``error`` (raised); ``time``; ``ended`` (the solution's
    process died); ``load`` (the solution cannot be run at all); ``refused`` (the test compares or passes something
    other than plain data); ``budget`` (the time for all tests was over); ``no verdict`` (the run was killed before)."""
    detail: str = ""
    seen: tuple[tuple[str, str], ...] = ()
    """For a failed test, if requested: parts of the assertion and their values, or ``stdout`` and ``stderr`` of the
    program. Each is shortened."""


@dataclass(frozen=True)
class Verdicts:
    """One `JudgeVerdict` per test, in the order of the suite: the tests, then the calls, then the programs."""

    of: tuple[JudgeVerdict, ...]
    protected: bool
    """Whether the sandbox prevented the solution's processes from inspecting the judge."""

    @property
    def pass_rate(self) -> float:
        """Passed tests over all tests, 0 to 1."""
        return sum(verdict.passed for verdict in self.of) / len(self.of)

    @property
    def time_outs(self) -> int:
        return sum(verdict.reason in ("time", "budget") for verdict in self.of)

    @property
    def refused(self) -> int:
        """Number of tests that need more than plain data, and so fail for every solution."""
        return sum(verdict.reason == "refused" for verdict in self.of)


class NoVerdict(Exception):
    """The judge did not run, because of the infrastructure and not of the solution."""


@dataclass(frozen=True)
class JudgeRun:
    """One run of the judge: a program for a sandbox or `/run_code`, and the parser of its answer."""

    code: str
    stdin: str
    files: dict[str, str]
    """The judge's modules in base64. `judge_modules` returns their bytes."""
    run_timeout: float
    """Time limit of the whole run in seconds."""
    token: str
    """Beginning of every line that the judge prints. The solution never sees it."""
    tests: int
    """Number of tests."""

    @classmethod
    def of(
        cls, solution: str, suite: TestSuite, test_seconds: float, total_seconds: float, max_display_chars: int = 0
    ) -> JudgeRun:
        """Build the run of a suite.

        `test_seconds` is the limit of one test, including loading the solution, and `total_seconds` that of all.
        `max_display_chars` is the total length of `seen` in the verdicts. Raises ValueError for an empty suite, which
        would accept every solution.
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
            "prelude": suite.prelude,
            "strict": suite.strict,
            "test_seconds": test_seconds,
            "total_seconds": total_seconds,
            "max_display_chars": max_display_chars,
        }
        return cls(_PROGRAM, json.dumps(job), _encoded_modules(), total_seconds + START_SECONDS, token, len(suite))

    def verdicts(self, response: RunCodeResponse) -> Verdicts:
        """Read the verdicts in an answer of `/run_code`. Raises NoVerdict like `read`."""
        ran = response.run_result
        if response.status == "SandboxError" or ran is None:
            raise NoVerdict(f"the sandbox did not run the tests: {response.message}")
        return self.read(ran.stdout or "", ran.stderr or "", f"{ran.status}, exit code {ran.return_code}")

    def read(self, stdout: str, stderr: str, ended: str) -> Verdicts:
        """Read the verdicts in the output of the judge. Tests without a verdict, after the run was killed, have failed.

        `ended` describes the end of the run. Raises NoVerdict if the judge did not start, and so the solution was not
        run either.
        """
        lines = self._lines(stdout)
        if not lines or not lines[0].get("ready"):
            raise NoVerdict(f"the judge did not start ({ended}): {stderr[-500:]}")
        found = {line["test"]: _verdict(line) for line in lines[1:]}
        missing = JudgeVerdict(False, "no verdict", f"the run ended: {ended}")
        return Verdicts(tuple(found.get(i, missing) for i in range(self.tests)), bool(lines[0]["protected"]))

    def _lines(self, stdout: str) -> list[dict[str, Any]]:
        marked = (line.partition(" ") for line in stdout.splitlines())
        # A killed run may leave a partial line.
        return [json.loads(text) for token, _, text in marked if token == self.token and text.endswith("}")]


def _verdict(line: Mapping[str, Any]) -> JudgeVerdict:
    seen = tuple((name, value) for name, value in line.get("seen", ()))
    return JudgeVerdict(line["passed"], line["reason"], line["detail"], seen)


@lru_cache(maxsize=1)
def judge_modules() -> dict[str, bytes]:
    """Return the judge's modules, and their bytecode for sandboxes with the same version of Python."""
    sources = {name: (_JUDGE / name).read_bytes() for name in _MODULES}
    tag = sys.implementation.cache_tag
    return {**sources, **{f"__pycache__/{name[:-3]}.{tag}.pyc": _pyc(name, text) for name, text in sources.items()}}


def _pyc(name: str, source: bytes) -> bytes:
    """Compile a module as in Python's cache, without a check against the file (PEP 552)."""
    unchecked = (1).to_bytes(4, "little")
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0))
    return MAGIC_NUMBER + unchecked + source_hash(source) + code


@lru_cache(maxsize=1)
def _encoded_modules() -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in judge_modules().items()}


def suite_in(given: Any, max_tests: int, strict: bool = False) -> TestSuite:
    """Read the tests in a problem's data, at most `max_tests` of them. For `strict` see `TestSuite`.

    `given` is one of these, or its JSON text:

    - a list of Python texts with assertions;
    - ``{"tests": [...], "programs": [[stdin, stdout], ...], "setup": ""}``, with at least one of the first two. The
      optional setup contains helper functions that the tests use and the solution cannot replace;
    - ``{"inputs": [...], "outputs": [...]}``: stdin and stdout of programs, each a text or a list of lines;
    - the same with ``"fn_name"``: arguments and results of a function, as in APPS, TACO and LiveCodeBench;
    - ``{"input": [...], "output": [...]}``, as in CodeContests;
    - a list of ``{"input": ..., "output": ...}``, with ``"testtype"`` (LiveCodeBench, DeepCoder: ``stdin`` or
      ``functional``) or ``"type"`` (PrimeIntellect: ``stdin_stdout`` or ``function_call``), or an object with this list
      as ``"test_cases"``. The function's name is ``"fn_name"``, or ``"func_name"`` in the ``"metadata"``.

    Raises ValueError if it has another form, contains no test, or a test that cannot fail.
    """
    value = _decoded(given)
    if not isinstance(value, Mapping):
        value = _of_list(_listed(value))
    if "test_cases" in value:
        setup = {"setup": value["setup"]} if "setup" in value else {}
        value = {**_of_list(_listed(_decoded(value["test_cases"])), value.get("fn_name")), **setup}
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


def _of_list(items: list[Any], function: Any = None) -> Mapping[str, Any]:
    """Convert a list of tests (texts, cases, or one text with an object) to an equivalent object."""
    if len(items) == 1 and isinstance(items[0], str) and items[0].lstrip().startswith("{"):
        only = _decoded(items[0])
        return only if isinstance(only, Mapping) and not _is_case(only) else _of_cases([only], function)
    decoded = [_decoded(item) if isinstance(item, str) and item.lstrip().startswith("{") else item for item in items]
    return _of_cases(decoded, function) if any(isinstance(item, Mapping) for item in decoded) else {"tests": items}


def _is_case(item: Any) -> bool:
    return isinstance(item, Mapping) and "input" in item and "output" in item


_CALLED = {"functional": True, "function_call": True, "stdin": False, "stdin_stdout": False, "": False}
"""Whether a case is a call of a function, by its ``testtype`` or ``type``."""


def _of_cases(cases: list[Any], function: Any) -> dict[str, Any]:
    """Convert a list of cases to ``inputs`` and ``outputs``. Raises ValueError if they have different forms."""
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
    """Check that a Python text can fail. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"a test is a Python text with assertions, not {str(text)[:80]!r}")
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text  # the judge reports the error
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes):
        raise ValueError(f"the test {text[:80]!r} cannot fail: it holds no assertion and calls nothing")
    return text


def _of_pairs(pairs: Any) -> tuple[list[TestCall], list[tuple[str, str]]]:
    """Read pairs as calls if there is a ``fn_name``, and as programs otherwise."""
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
    """Read arguments from a list, or from a text with a line of JSON each, Python literals, or a single string."""
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
    """Convert the keys of a first argument to integers if possible, since JSON has strings as keys only.

    APPS and the data sets derived from it do the same.
    """
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
    """Write a JSON value as Python literal, and NaN and the infinities, which have none, with ``1e999``."""
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
