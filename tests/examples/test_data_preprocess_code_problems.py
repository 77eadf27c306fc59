"""Rows of the published sets of problems, in their own form, become tests that the judge reads.

The rows are hand-made; their fields and the forms of these are those of the data sets' pages: apps, TACO,
code_contests, code_generation_lite, DeepCoder-Preview-Dataset, verifiable-coding-problems, SYNTHETIC-1 and KodCode-V1.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from verl_tool.judge.code_tests import TestSuite, suite_in

pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")

SCRIPTS = Path(__file__).parents[2] / "examples" / "data_preprocess"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the scripts on the path, as when one of them is run, and no hub."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    for name in ("code_problems", "acecoder", "rows"):
        sys.modules.pop(name, None)


def packed(cases: list[Any]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
LINES = json.dumps({"inputs": [["1 2", "0"]], "outputs": [["3"]]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]})
STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
APPS = {
    "problem_id": 1,
    "question": "Add.",
    "solutions": "[]",
    "difficulty": "interview",
    "url": "u",
    "starter_code": "",
}
TACO = {
    **{"question": "Add.", "solutions": "[]", "starter_code": "def add(a, b):", "difficulty": "EASY", "raw_tags": "[]"},
    **{"name": None, "source": "codewars", "tags": "[]", "skill_types": "[]", "url": "u", "time_limit": None},
    **{"Expected Auxiliary Space": None, "date": None, "picture_num": None, "memory_limit": None},
}
CONTESTS = {
    **{"name": "1_A", "description": "Add.", "source": 2, "difficulty": 7, "input_file": "", "output_file": ""},
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["3 4\n"], "output": ["7\n"]},
    "solutions": {"language": [3], "solution": ["print(sum(map(int, input().split())))"]},
    "time_limit": {"seconds": 2, "nanos": 0},
}
LIVE = {
    **{"question_title": "Add", "question_content": "Add.", "platform": "atcoder", "question_id": "abc1_a"},
    **{"contest_id": "abc1", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy"},
}
KOD_TEST = """
import pytest
from solution import add

CASES = [(1, 2, 3), (3, 4, 7)]

def test_small():
    assert add(1, 2) == 3

@pytest.mark.parametrize("a, b, total", CASES)
def test_cases(a, b, total):
    assert add(a, b) == total
"""
PRIME = {"source": "apps", "task_type": "verifiable_code", "in_source_id": "1", "prompt": "Add.", "problem_id": "p1"}
PRIME_STDIN = [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]
PRIME_CALL = [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]

TWO = (("1 2\n", "3\n"), ("3 4\n", "7\n"))
ROWS: list[tuple[str, dict[str, Any], Any]] = [
    ("apps", {**APPS, "input_output": PAIRS}, TWO),
    ("apps", {**APPS, "input_output": LINES}, (("1 2\n0", "3"),)),
    ("apps", {**APPS, "input_output": CALLS}, ["add(1, 2)", "add(3, 4)"]),
    ("taco", {**TACO, "input_output": CALLS}, ["add(1, 2)", "add(3, 4)"]),
    ("taco", {**TACO, "input_output": PAIRS}, TWO),
    ("code_contests", CONTESTS, TWO),
    (
        "livecodebench",
        {**LIVE, "public_test_cases": json.dumps(STDIN), "private_test_cases": json.dumps(STDIN), "metadata": "{}"},
        (("1 2\n", "3\n"),) * 2,
    ),
    (
        "livecodebench",
        {
            **LIVE,
            "public_test_cases": json.dumps(FUNCTIONAL),
            "private_test_cases": packed(FUNCTIONAL),
            "metadata": '{"func_name": "add"}',
        },
        ["add([1, 2], 3)"] * 2,
    ),
    ("deepcoder", {"problem": "Add.", "tests": json.dumps(STDIN)}, (("1 2\n", "3\n"),)),
    (
        "deepcoder",
        {
            "problem": "Add.",
            "starter_code": "class Solution:",
            "tests": json.dumps([{**FUNCTIONAL[0], "metadata": {"func_name": "add"}}]),
        },
        ["add([1, 2], 3)"],
    ),
    ("deepcoder", {"problem": "Add.", "solutions": [], "tests": json.dumps(PRIME_STDIN)}, (("1 2\n", "3\n"),)),
    ("deepcoder", {"problem": "Add.", "solutions": [], "tests": json.dumps(PRIME_CALL)}, ["add(1, 2)"]),
    ("deepcoder", {"problem": "Add.", "solutions": [], "tests": PAIRS}, TWO),
    (
        "primeintellect",
        {**PRIME, "verification_info": json.dumps({"language": "python", "test_cases": PRIME_STDIN})},
        (("1 2\n", "3\n"),),
    ),
    (
        "primeintellect",
        {**PRIME, "verification_info": str({"fn_name": "add", "test_cases": PRIME_CALL})},
        ["add(1, 2)"],
    ),
]


@pytest.mark.parametrize(("source", "fields", "wanted"), ROWS)
def test_rows_of_each_source(source: str, fields: dict[str, Any], wanted: Any) -> None:
    suite = suite_of(source, fields)
    assert not suite.tests
    assert suite.programs == wanted if isinstance(wanted, tuple) else [str(call) for call in suite.calls] == wanted


def suite_of(source: str, fields: dict[str, Any]) -> TestSuite:
    import code_problems

    row = code_problems.as_row(fields, "train", 0, code_problems.Source(source), False)
    assert row["ability"] == "code"
    assert "Add." in row["prompt"][-1]["content"]
    return suite_in(row["reward_model"]["ground_truth"], 64)


def test_functions_of_pytest_become_tests_that_can_fail() -> None:
    tests = suite_of("kodcode", {"question": "Add.", "solution": "def add(a, b): ...", "test": KOD_TEST}).tests
    assert len(tests) == 2
    for text in tests:
        assert "solution" not in text
        exec(text, {"add": lambda a, b: a + b})
        with pytest.raises(AssertionError):
            exec(text, {"add": lambda a, b: a - b})


@pytest.mark.parametrize(
    ("source", "fields", "words"),
    [
        ("apps", {**APPS, "input_output": ""}, "field 'input_output' is empty"),
        ("apps", {**APPS, "input_output": "{"}, "neither JSON nor a literal"),
        ("taco", {**TACO, "input_output": '{"cases": []}'}, "has no 'inputs' and 'outputs'"),
        ("taco", {**TACO, "input_output": '{"inputs": [["a", ["b"]]], "outputs": ["1"]}'}, "a line of stdin"),
        ("code_contests", {**CONTESTS, "input_file": "in.txt"}, "only stdin and stdout"),
        ("deepcoder", {"problem": "Add.", "tests": '[{"input": "1", "output": "2", "testtype": "web"}]'}, "unknown"),
        ("deepcoder", {"problem": "Add.", "tests": '[{"question": "1", "answer": "2"}]'}, "is no test"),
        ("deepcoder", {"problem": "Add.", "tests": json.dumps(FUNCTIONAL)}, "name no function"),
        ("deepcoder", {"problem": "Add.", "tests": json.dumps(STDIN + FUNCTIONAL)}, "several kinds"),
        ("primeintellect", {**PRIME, "verification_info": "{}"}, "no 'test_cases'"),
        (
            "livecodebench",
            {**LIVE, "public_test_cases": "[]", "private_test_cases": base64.b64encode(b"x").decode()},
            "cannot be unpacked",
        ),
        ("kodcode", {"question": "Add.", "test": "import solution"}, "no function whose name"),
        ("kodcode", {"question": "Add.", "test": "def test_it(tmp_path): assert 1"}, "fixtures: tmp_path"),
        ("kodcode", {"question": "Add.", "test": "def test_it():\n    print(1)"}, "asserts nothing"),
    ],
)
def test_other_forms_are_errors(source: str, fields: dict[str, Any], words: str) -> None:
    import code_problems
    from rows import RowError

    with pytest.raises(RowError, match=words):
        code_problems.as_row(fields, "train", 0, code_problems.Source(source), False)


def test_private_tests_that_are_code_are_not_run() -> None:
    import code_problems
    from rows import RowError

    class Evil:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit",))

    value = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(RowError, match=r"builtins.exec"):
        code_problems._private_cases(value, 0)


def test_the_script_counts_what_it_leaves_out(tmp_path: Path) -> None:
    import code_problems

    rows = [{**APPS, "question": f"Add. {i}", "input_output": PAIRS} for i in range(3)]
    rows.append({**APPS, "question": "Broken.", "input_output": ""})
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    app = typer.Typer()
    app.command()(code_problems.main)
    arguments = ["--source", "apps", "--dataset_path", str(source), "--test_size", "1", "--local_dir", str(tmp_path)]
    failed = CliRunner().invoke(app, arguments)
    assert "'input_output' is empty" in str(failed.exception)
    ran = CliRunner().invoke(app, [*arguments, "--skip_unreadable"])
    assert ran.exit_code == 0, ran.output
    assert "1 of 4 rows are left out" in ran.output
    assert len(pd.read_parquet(tmp_path / "train.parquet")) == 2


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ({"inputs": ["[1]\n2"], "outputs": ["3"], "fn_name": "f"}, ["f([1], 2)"]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, (("1\n2", "3"),)),
    ],
)
def test_acecoder_s_pairs(pairs: dict[str, Any], wanted: Any) -> None:
    import acecoder

    suite = suite_in(acecoder.tests_of({"inputs_outputs": json.dumps(pairs)}, 0), 64)
    assert suite.programs == wanted if isinstance(wanted, tuple) else [str(call) for call in suite.calls] == wanted
