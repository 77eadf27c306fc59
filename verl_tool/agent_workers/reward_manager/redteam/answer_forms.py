"""The form in which a reward manager wants an answer, found in its file and in the rows. For `redteam`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_tool.agent_workers.reward_manager.grading.manager_process import UnusableError
from verl_tool.agent_workers.reward_manager.redteam.attacks import golden_text

MAX_FORMS = 24
"""Candidates that are tried; the manager says which of them it accepts."""
_MAX_MARK = 40
_TAG = re.compile(r"<([A-Za-z][\w-]*)>")
_LITERAL = re.compile(r"[^\\\[\](){}*+?^$|]+")
"""The beginning of a regular expression that stands for itself."""
_MARK = re.compile(r"(?:[A-Z][\w ]{0,20}|[a-z]\w{0,20}) ?[:=]|#{2,}|\\boxed\{|<[A-Za-z][\w-]*>")
"""What stands before an answer, in a prompt that tells of it."""


def read_form(text: str) -> str:
    """A form of the command line, such as ``Answer: {}``, as `FORMS` has it. Raises UnusableError without its place."""
    if text.count("{}") != 1:
        raise UnusableError(f"--form {text!r} needs {{}} once, where the answer stands, such as 'Answer: {{}}'")
    return _make_form(*text.split("{}"))


def candidate_forms(manager: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Forms that the manager's file, or the rows' texts, may mean, each once."""
    found = [form for row in rows for form in _find_solution_forms(row)]
    found += [form for mark in _find_marks(manager) for form in _wrap_mark(mark)]
    found += [form for row in rows for mark in _MARK.findall(_prompt_text(row)) for form in _wrap_mark(mark)]
    return list(dict.fromkeys(found))[:MAX_FORMS]


def _make_form(before: str, after: str) -> str:
    escaped = [part.replace("{", "{{").replace("}", "}}") for part in (before, after)]
    return "{}".join(escaped)


def _wrap_mark(mark: str) -> Iterator[str]:
    """Forms of an answer with this mark before it."""
    mark = mark.strip()
    if tag := _TAG.fullmatch(mark):
        yield _make_form(mark, f"</{tag[1]}>")
    elif mark.endswith("{"):
        yield _make_form(mark, "}")
    else:
        yield _make_form(f"{mark} ", "")
        yield _make_form(mark, "")


def _find_marks(manager: str) -> Iterator[str]:
    """Short texts of a Python file that may be marks; a regular expression by its beginning."""
    if not manager.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(manager).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):  # whoever makes the manager tells of it
        return
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        for text in (node.value, *_LITERAL.findall(node.value)[:1]):
            if 0 < len(text.strip()) <= _MAX_MARK and "\n" not in text and re.search(r"[^\w\s,.]", text):
                yield text


def _find_solution_forms(row: Mapping[str, Any]) -> Iterator[str]:
    """The line of a text of the row that ends in, or frames, its gold answer: that of a worked solution."""
    gold = golden_text(row["ground_truth"]).strip()
    extra = row.get("extra_info")
    texts = [row.get(name) for name in ("answer", "solution", "response")]
    texts += list(extra.values()) if isinstance(extra, Mapping) else []
    for text in texts:
        lines = [line.strip() for line in text.splitlines() if gold in line] if isinstance(text, str) and gold else []
        if lines and lines[-1] != gold and len(lines[-1]) <= len(gold) + 2 * _MAX_MARK:
            before, _, after = lines[-1].rpartition(gold)
            yield _make_form(before[-_MAX_MARK:], after)


def _prompt_text(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    try:
        return " ".join(str(message.get("content", "")) for message in prompt or ())
    except (AttributeError, TypeError):
        return json.dumps(prompt, default=str)
