"""The page's table lists the checks that there are, and as what each is told."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
from doc_tables import names, table

from verl_tool import checks
from verl_tool.checks import FIRST, OTHERS
from verl_tool.checks.reward import constant_answers

OF_ROWS = (checks.columns_are_there, checks.ground_truth_leak, checks.most_frequent_gold, constant_answers)
CHECKS: dict[str, Callable[..., object]] = {check.__name__: check for check in (*FIRST, *OTHERS, *OF_ROWS)}
ROWS = {names(row[0])[0]: row[1:] for row in table("doctor.md", "Check")}


def severities(check: Callable[..., object]) -> set[str]:
    """Names of the severities in a check, and in the functions of its module that it reaches."""
    module = inspect.getmodule(check)
    assert isinstance(module, ModuleType)
    functions = {
        node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)
    }
    seen: set[str] = set()
    todo, found = [check.__name__], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Severity":
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                todo.append(node.id)
    return found


def test_every_check_is_in_the_table_and_no_other() -> None:
    assert set(ROWS) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_table_has_the_severity_of_each_check(name: str) -> None:
    error, warning = (bool(cell) for cell in ROWS[name])
    told = severities(CHECKS[name])
    assert ("ERROR" in told, "WARNING" in told) == (error, warning), told
