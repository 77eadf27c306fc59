"""AceCoder's problems with hidden tests (arXiv 2502.01718), for the reward manager `acecoder`.

    python examples/data_preprocess/acecoder.py --dataset_path CodeDPO/AceCoderV2-mini-processed --add_execution_prompt
    python examples/data_preprocess/acecoder.py --dataset_path TIGER-Lab/AceCode-87K
    python examples/data_preprocess/acecoder.py --dataset_path examples/data_preprocess/samples/acecoder.jsonl

A source's row has `id`, `question`, and asserts in `test_cases` (AceCode-87K) or `tests` (the processed sets). Problems
that read stdin have `inputs_outputs` instead: JSON of `{"inputs": [...], "outputs": [...]}`, those that ask for a
function its `"fn_name"` too. Sets of other sources: `code_problems.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import (
    WITHOUT_TOOL,
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
    row,
    rows_without_tool,
    run,
    save,
)

from verl_tool.judge.code_tests import suite_in

DATA_SOURCE = "acecoder"
TESTS = ("test_cases", "tests")
EXECUTION_PROMPT = """\
You solve programming problems with the help of a Python interpreter. Think about the problem first. Whenever you want
to try something, write a program between ```python and ``` and put ```output on the next line: it is run, and what it
prints follows. Each program runs on its own, so repeat what it needs. Run as many as you like.

The problem may give a signature or some code to start from: then use it. If it gives neither, write a program that
reads standard input and writes standard output.

When you are sure, give the final program in one block between ```python and ```, and write nothing after it. Tests that
you do not see decide whether it is right."""
PLAIN_PROMPT = """\
You solve programming problems. Think step by step, then give the final program in one block between ```python and ```,
and write nothing after it.

The problem may give a signature or some code to start from: then use it. If it gives neither, write a program that
reads standard input and writes standard output. Tests that you do not see decide whether it is right."""


def as_row(
    source: Mapping[str, Any], split: str, index: int, execution_prompt: bool, system_prompt: bool = True
) -> Row:
    """One problem. Its tests are the ground truth. Without `system_prompt` the question stands alone."""
    question = field(source, "question", index)
    system = (EXECUTION_PROMPT if execution_prompt else PLAIN_PROMPT) if system_prompt else None
    extra = {"id": str(source.get("id", "")), "question": question}
    tests = json.dumps(tests_of(source, index))
    return row(DATA_SOURCE, messages(system, question), "code", tests, split, index, extra, execution_prompt)


def tests_of(source: Mapping[str, Any], index: int) -> dict[str, Any]:
    """`{"tests": [...]}`, `{"programs": [[stdin, stdout], ...]}`, `{"inputs": [...], "outputs": [...], "fn_name": ""}`,
    or tests and one of the others. Raises RowError if there is none, or the judge cannot read it."""
    found: dict[str, Any] = {}
    name = next((name for name in TESTS if source.get(name)), None)
    if name is not None:
        found["tests"] = [str(test) for test in field(source, name, index, list)]
    if source.get("inputs_outputs"):
        found |= _pairs(source["inputs_outputs"], index)
    if not found:
        wanted = ", ".join((*TESTS, "inputs_outputs"))
        raise RowError(f"row {index} has no tests: one of the fields {wanted} must hold some")
    return found


def _pairs(text: Any, index: int) -> dict[str, Any]:
    """Arguments and values of a function, or stdin and stdout of programs."""
    try:
        pairs = json.loads(text) if isinstance(text, str) else text
        suite = suite_in(
            {"inputs": pairs["inputs"], "outputs": pairs["outputs"], "fn_name": pairs.get("fn_name")}, 10**9
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RowError(f"row {index}: 'inputs_outputs' needs as many inputs as outputs: {error!r}") from error
    if suite.calls:
        return {name: pairs[name] for name in ("inputs", "outputs", "fn_name")}
    return {"programs": [list(program) for program in suite.programs]}


def main(
    dataset_path: DatasetPath = "CodeDPO/AceCoderV2-mini-processed",
    local_dir: LocalDir = Path("data/acecoder"),
    add_execution_prompt: Annotated[
        bool, typer.Option("--add_execution_prompt", help="Tell the model about the interpreter, and let it be used.")
    ] = False,
    system_prompt: Annotated[bool, typer.Option(" /--no_system_prompt", help="Give the question alone.")] = True,
    without_tool: Annotated[
        bool, typer.Option("--without_tool", help="Write the test problems once more, to be solved without the tool.")
    ] = False,
    test_size: TestSize = 500,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make the AceCoder data set."""
    source = load(dataset_path, limit=limit)
    # AceCode-87K is five gigabytes, almost all of them inferences that are of no use here.
    source = source.select_columns(
        [c for c in source.column_names if c in ("id", "question", *TESTS, "inputs_outputs")]
    )
    splits = divide(source, "question", test_size, seed)
    rows = convert(splits, partial(as_row, execution_prompt=add_execution_prompt, system_prompt=system_prompt))
    if without_tool:
        make = partial(as_row, execution_prompt=False, system_prompt=system_prompt)
        rows |= rows_without_tool(splits["test"], make, f"{DATA_SOURCE}_{WITHOUT_TOOL}")
    save(rows, local_dir)


if __name__ == "__main__":
    run(main)
