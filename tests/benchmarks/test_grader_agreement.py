"""The cases by which our graders are compared with the field's, graded by ours."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.script_module import load_script
from verl_tool.agent_workers.reward_manager.grading.answers import last_boxed
from verl_tool.agent_workers.reward_manager.grading.math_process import compare

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MATH = [
    json.loads(line) for line in (BENCHMARKS / "grader_cases" / "math.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    return load_script("grader_agreement", BENCHMARKS / "grader_agreement.py")


@pytest.mark.parametrize("case", MATH, ids=[f"{case['gold']}={case['answer']}" for case in MATH])
def test_mathematics(case: dict[str, str]) -> None:
    answer = last_boxed(f"\\boxed{{{case['answer']}}}")
    assert compare(case["gold"], answer or "") == case["right"]


@pytest.mark.parametrize("case", [case for case in MATH if case["right"]], ids=lambda case: case["gold"])
def test_blanks_change_nothing(case: dict[str, str]) -> None:
    """A gold answer with the blanks that models write."""
    gold = case["gold"]
    for blank in (",", "=", "+", "{"):
        spaced = gold.replace(blank, f"{blank} ") if "\\text" not in gold and "\\begin" not in gold else gold
        assert compare(gold, spaced), (gold, spaced)


@pytest.mark.parametrize("kind", ["code", "search", "gsm8k"])
async def test_other_kinds(benchmark_module: ModuleType, kind: str) -> None:
    cases = benchmark_module.cases_of(kind)
    found = await benchmark_module.ours(kind, cases)
    assert [
        benchmark_module.name_of(case) for case, said in zip(cases, found, strict=True) if said != case["right"]
    ] == []


def test_the_table_names_the_grader_that_is_right(benchmark_module: ModuleType) -> None:
    cases = [{"name": name, "right": right} for name, right in (("a", True), ("b", True), ("c", False), ("d", True))]
    table = benchmark_module.compared(cases, [True, True, True, False], [True, False, False, False])
    assert (table.agree, table.only_ours, table.only_theirs) == (1, ["right: b"], ["wrong: c"])
    assert table.both_wrong == ["right: d"]
