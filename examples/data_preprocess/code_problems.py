"""Problems with hidden tests of other sources than AceCoder's, for the reward manager `acecoder`.

    python examples/data_preprocess/code_problems.py --source taco --dataset_path BAAI/TACO
    python examples/data_preprocess/code_problems.py --source kodcode --dataset_path KodCode/KodCode-V1
    python examples/data_preprocess/code_problems.py --source livecodebench --dataset_path samples/livecodebench.jsonl

| `--source` | Published as | Tests |
|---|---|---|
| `apps` | codeparrot/apps | `input_output`, JSON of `inputs`, `outputs` and, of functions, `fn_name` |
| `taco` | BAAI/TACO | the same |
| `code_contests` | deepmind/code_contests | `public_tests`, `private_tests`, `generated_tests` of `input`, `output` |
| `livecodebench` | livecodebench/code_generation_lite | `public_test_cases`, `private_test_cases` (may be packed) |
| `deepcoder` | agentica-org/DeepCoder-Preview-Dataset | `tests`, JSON of a list of cases, or as of TACO |
| `primeintellect` | PrimeIntellect/verifiable-coding-problems, SYNTHETIC-1 | `verification_info`, of `test_cases` |
| `kodcode` | KodCode/KodCode-V1 | `test`, functions for pytest that import from `solution` |

A row whose tests are of no such form ends the script with an error that names it. `--skip_unreadable` leaves such rows
out and prints how many there were, and why.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from acecoder import EXECUTION_PROMPT, PLAIN_PROMPT
from rows import (
    DatasetPath,
    Limit,
    LocalDir,
    Row,
    RowError,
    Seed,
    TestSize,
    convert,
    divide,
    field,
    load,
    messages,
    read_all,
    row,
    run,
    save,
)

from verl_tool.judge.code_tests import suite_in

MAX_TESTS = 64
"""What the reward manager runs by default; a row's further tests are kept for a larger `max_tests`."""
MAX_UNPACKED_BYTES = 256 << 20
"""Of LiveCodeBench's private tests of one problem."""
Tests = dict[str, Any]


def input_output_tests(source: Mapping[str, Any], index: int) -> Tests:
    """APPS and TACO. Raises RowError."""
    return _pairs(_json(field(source, "input_output", index, str, Mapping), "input_output", index), index)


def code_contests_tests(source: Mapping[str, Any], index: int) -> Tests:
    """CodeContests: the public tests first. Raises RowError for a problem that reads or writes files."""
    for name in ("input_file", "output_file"):
        if source.get(name):
            raise RowError(f"row {index} has {name} {source[name]!r}; only stdin and stdout are judged")
    inputs: list[str] = []
    outputs: list[str] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        tests = source.get(name) or {"input": [], "output": []}
        if not isinstance(tests, Mapping) or "input" not in tests or "output" not in tests:
            raise RowError(f"row {index}: {name!r} must have 'input' and 'output'")
        inputs += tests["input"]
        outputs += tests["output"]
    return _pairs({"inputs": inputs, "outputs": outputs}, index)


def livecodebench_tests(source: Mapping[str, Any], index: int) -> Tests:
    """LiveCodeBench: public and private tests; a function's name is in the row's `metadata`. Raises RowError."""
    cases = list(_json(field(source, "public_test_cases", index, str, list), "public_test_cases", index))
    cases += _private_cases(field(source, "private_test_cases", index, str, list), index)
    function = _json(source.get("metadata") or "{}", "metadata", index).get("func_name")
    return {"test_cases": cases, **({"fn_name": function} if function else {})}


def deepcoder_tests(source: Mapping[str, Any], index: int) -> Tests:
    """DeepCoder: cases, or pairs as in TACO. Raises RowError."""
    tests = _json(field(source, "tests", index, str, list, Mapping), "tests", index)
    if isinstance(tests, Mapping):
        return _pairs(tests, index)
    metadata = _json(source.get("metadata") or "{}", "metadata", index)
    function = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return {"test_cases": list(tests), **({"fn_name": function} if function else {})}


def primeintellect_tests(source: Mapping[str, Any], index: int) -> Tests:
    """PrimeIntellect's sets: JSON, or a dictionary as Python writes it. Raises RowError."""
    info = _json(field(source, "verification_info", index, str, Mapping), "verification_info", index)
    if not isinstance(info, Mapping) or "test_cases" not in info:
        raise RowError(f"row {index}: 'verification_info' has no 'test_cases'")
    language = info.get("language") or "python"
    if language != "python":
        raise RowError(f"row {index} is for {language!r}; only Python is judged")
    function = info.get("fn_name")
    cases = _json(info["test_cases"], "test_cases", index)
    return {"test_cases": list(cases), **({"fn_name": function} if function else {})}


def kodcode_tests(source: Mapping[str, Any], index: int) -> Tests:
    """KodCode: one test a function `test_…`, called without pytest. Raises RowError for fixtures and the like."""
    text = field(source, "test", index)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise RowError(f"row {index}: 'test' is no Python: {error}") from error
    shared = [node for node in tree.body if not _is_of_solution(node) and not _is_test(node)]
    tests = [_called(shared, node, index) for node in tree.body if isinstance(node, ast.FunctionDef) and _is_test(node)]
    if not tests:
        raise RowError(f"row {index}: 'test' has no function whose name begins with test_")
    return {"tests": tests}


def _is_of_solution(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "solution"
    return isinstance(node, ast.Import) and any(alias.name == "solution" for alias in node.names)


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _called(shared: Sequence[ast.stmt], test: ast.FunctionDef, index: int) -> str:
    """The text of one test: what it shares with others, the function without decorators, and its calls."""
    if not any(isinstance(node, ast.Assert) or ast.unparse(node) == "pytest.raises" for node in ast.walk(test)):
        raise RowError(f"row {index}: {test.name} asserts nothing, so that it could not fail")
    arguments = [name.arg for name in test.args.args]
    values = [_parameters(decorator, index) for decorator in test.decorator_list]
    if len(values) > 1 or arguments != (values[0][0] if values else []):
        raise RowError(f"row {index}: {test.name} needs more than one parametrize, or fixtures: {', '.join(arguments)}")
    plain = ast.FunctionDef(test.name, test.args, test.body, [], None, lineno=1, col_offset=0)
    module = ast.Module([*shared, plain], [])
    text = ast.unparse(ast.fix_missing_locations(module))
    if not values:
        return f"{text}\n{test.name}()"
    names, rows = values[0]
    star = "*" if len(names) > 1 else ""
    return f"{text}\nfor each in {rows}:\n    {test.name}({star}each)"


def _parameters(decorator: ast.expr, index: int) -> tuple[list[str], str]:
    """Names and the text of the list of values of ``pytest.mark.parametrize``. Raises RowError for other decorators."""
    known = isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize"
    if not known or len(decorator.args) != 2:  # type: ignore[attr-defined]
        raise RowError(
            f"row {index}: a test has the decorator {ast.unparse(decorator)[:80]!r}; only parametrize is known"
        )
    names, rows = decorator.args  # type: ignore[attr-defined]
    if isinstance(names, ast.Constant):
        return [name.strip() for name in str(names.value).split(",")], ast.unparse(rows)
    return list(ast.literal_eval(names)), ast.unparse(rows)


class _NoClasses(pickle.Unpickler):
    """Reads a pickled text, and nothing that would have to be looked up or run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in what should be a text")


def _private_cases(value: Any, index: int) -> list[Any]:
    """JSON, or JSON that is pickled, compressed and base64."""
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return list(_json(value, "private_test_cases", index))
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(value), MAX_UNPACKED_BYTES)
        return list(json.loads(_NoClasses(io.BytesIO(unpacked)).load()))
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise RowError(f"row {index}: 'private_test_cases' cannot be unpacked: {error}") from error


def _json(value: Any, name: str, index: int) -> Any:
    """A value, or that of its JSON, or of Python's own writing. Raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise RowError(f"row {index}: {name!r} is neither JSON nor a literal of Python: {value[:80]!r}") from error


def _pairs(pairs: Any, index: int) -> Tests:
    if not isinstance(pairs, Mapping) or "inputs" not in pairs or "outputs" not in pairs:
        raise RowError(f"row {index}: {str(pairs)[:80]!r} has no 'inputs' and 'outputs'")
    return {name: pairs[name] for name in ("inputs", "outputs", "fn_name") if pairs.get(name)}


class Source(str, Enum):
    """Whose rows are read."""

    apps = "apps"
    taco = "taco"
    code_contests = "code_contests"
    livecodebench = "livecodebench"
    deepcoder = "deepcoder"
    primeintellect = "primeintellect"
    kodcode = "kodcode"


SOURCES: dict[Source, tuple[str, Callable[[Mapping[str, Any], int], Tests]]] = {
    Source.apps: ("question", input_output_tests),
    Source.taco: ("question", input_output_tests),
    Source.code_contests: ("description", code_contests_tests),
    Source.livecodebench: ("question_content", livecodebench_tests),
    Source.deepcoder: ("problem", deepcoder_tests),
    Source.primeintellect: ("prompt", primeintellect_tests),
    Source.kodcode: ("question", kodcode_tests),
}
"""The field with the question, and what reads the tests."""


def tests_of(source: Mapping[str, Any], index: int, kind: Source) -> Tests:
    """The ground truth of a row, which the judge has read. Raises RowError."""
    tests = SOURCES[kind][1](source, index)
    try:
        suite_in(tests, MAX_TESTS)
    except ValueError as error:
        raise RowError(f"row {index}: {error}") from error
    return tests


def as_row(source: Mapping[str, Any], split: str, index: int, kind: Source, tool: bool) -> Row:
    """One problem, with the code to start from behind the question. Raises RowError."""
    question = field(source, SOURCES[kind][0], index)
    starter = str(source.get("starter_code") or "").strip()
    content = f"{question}\n\n```python\n{starter}\n```" if starter else question
    tests = json.dumps(tests_of(source, index, kind))
    system = EXECUTION_PROMPT if tool else PLAIN_PROMPT
    return row(kind.value, messages(system, content), "code", tests, split, index, {"question": question}, tool)


def readable(source: Sequence[Mapping[str, Any]], kind: Source) -> Sequence[Mapping[str, Any]]:
    """The rows whose tests can be read; prints how many cannot, and the first reasons."""

    def read(each: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        tests_of(each, index, kind)
        return each

    return read_all(source, read, skip=True)


def main(
    source: Annotated[Source, typer.Option("--source", help="The form of the rows.")],
    dataset_path: DatasetPath,
    local_dir: LocalDir = Path("data/code_problems"),
    tool: Annotated[bool, typer.Option(help="Tell the model about the interpreter, and let it be used.")] = True,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip_unreadable", help="Leave out rows whose tests cannot be read, and count them.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="Configuration of a data set on the hub.")] = None,
    test_size: TestSize = 500,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make a data set of problems with tests."""
    rows: Any = load(dataset_path, name=name, limit=limit)
    if skip_unreadable:
        rows = readable(rows, source)
    splits = divide(rows, SOURCES[source][0], test_size, seed)
    save(convert(splits, partial(as_row, kind=source, tool=tool)), local_dir)


if __name__ == "__main__":
    run(main)
