#!/usr/bin/env python3
"""Writes assets/docs/reference.md from docstrings: `python scripts/make_reference.py`. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "assets/docs/reference.md"
CLASSES = {
    "Writing a tool": {
        "verl_tool/servers/tools/typed/function_tool.py": "tool",
        "verl_tool/servers/tools/typed/trajectory_tools.py": "TrajectoryTools",
        "verl_tool/servers/tools/base.py": "Context ToolResult CallError InvalidCall ToolOptions Tool",
        "verl_tool/formats/base.py": "Call Format",
    },
    "Writing a reward": {
        "verl_tool/agent_workers/reward_manager/base.py": "GradingRewardManager",
        "verl_tool/agent_workers/reward_manager/grade.py": "Grade GraderFault",
        "verl_tool/agent_workers/reward_manager/grading/sample.py": "Sample",
        "verl_tool/agent_loop/trajectory.py": "Trajectory Segment CallRecord",
    },
    "Calling tools": {
        "verl_tool/client/tool_client.py": "ToolClient",
        "verl_tool/protocol.py": "StepRequest StepResult Fault FaultKind ToolDescription",
    },
    "In a notebook": {
        "verl_tool/text_environment.py": "TextEnvironment",
        "verl_tool/text_history.py": "TextHistory",
    },
}
TOOLS = "verl_tool.servers.tools"
"""The package that exports what its modules define for users."""
HEAD = """# Reference

What a tool, a reward or a notebook meets. Made from their docstrings by `python scripts/make_reference.py`;
to change a text, change the docstring.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for chapter, files in CLASSES.items():
        parts.append(f"## {chapter}\n")
        for file, names in files.items():
            body = ast.parse((ROOT / file).read_text("utf-8")).body
            known = {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
            parts += [part for name in names.split() for part in _entry(known[name], _module(file))]
    return "\n".join(parts)


def _module(file: str) -> str:
    """Where users import from."""
    module = file.removesuffix(".py").replace("/", ".")
    return TOOLS if module.startswith(f"{TOOLS}.") else module


def _entry(node: ast.ClassDef | ast.FunctionDef, module: str) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from _class(node, module)
    else:
        yield f"### {node.name}\n\n`from {module} import {node.name}`\n"
        yield f"**`{_signature('', node)}`**\n\n{_text(node)}"


def _class(node: ast.ClassDef, module: str) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"### {node.name}\n\n`from {module} import {node.name}`{f'; subclass of `{bases}`' if bases else ''}\n"
    yield _text(node)
    fields = [line for i, child in enumerate(node.body) for line in _field(child, node.body[i + 1 : i + 2])]
    if fields:
        yield "\n".join(fields) + "\n"
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and _public(child.name):
            yield f"**`{_signature(node.name, child)}`**\n\n{_text(child)}"


def _field(node: ast.stmt, behind: list[ast.stmt]) -> Iterator[str]:
    """A line for an attribute; its docstring is the string `behind` it."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        name, kind = node.target.id, f": {ast.unparse(node.annotation)}"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name, kind = node.targets[0].id, ""
    else:
        return
    if not _public(name) or name == "model_config":
        return
    value = f" = {ast.unparse(node.value)}" if node.value is not None else ""
    told = [s.value.value for s in behind if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    words = f": {_markdown(' '.join(str(told[0]).split()))}" if told else ""
    yield f"- `{name}{kind}{value if len(value) < 60 else ' = …'}`{words}"


def _signature(owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
        return node.name
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    name = owner if node.name == "__init__" else node.name
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name != owner else ""
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{name}({arguments}){returns}"


def _public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def _text(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return _markdown(ast.get_docstring(node) or "") + "\n"


def _markdown(docstring: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", docstring)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
