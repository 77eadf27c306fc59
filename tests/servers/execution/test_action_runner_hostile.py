"""No call of any tool holds up the event loop, whatever is in it, and other trajectories wait for none."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hostile import MAX_CALLBACK_SECONDS, longest_callback

from verl_tool.protocol import DIRECT_FIELD, FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.action_runner import MAX_ACTION_CHARACTERS, MAX_CALL_CHARACTERS
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import known_tools, load_tools, tool_classes
from verl_tool.servers.tools.base import Tool
from verl_tool.servers.tools.bash_terminal import BashTerminalTool
from verl_tool.servers.tools.ipython_code import IPythonCodeTool
from verl_tool.servers.tools.sql import SqlTool
from verl_tool.servers.tools.str_replace_editor import StrReplaceEditorTool

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

HONEST_SECONDS = 5.0
"""For a call of another trajectory that takes milliseconds; a busy machine needs longer."""
PLAIN = (
    *("calculator", "python_code", "python_oj", "finish"),
    *("draw", "rotate", "zoom_in", "measure", "select_frames", "audio_crop"),
)
SERVICES = {
    *(
        "browser",
        "search_retrieval",
        "web_search",
        "google_search",
        "bing_search",
        "web_page",
        "piston",
        "sandbox_fusion",
    ),
    "pixel_reasoner",  # of the same parts as zoom_in and select_frames
}
"""Tools that pass a call on, within limits of their own, to what is not started here."""
_LONG = 250_000
TEXTS = {
    "letters": "a" * _LONG,
    "line breaks": "\n" * _LONG,
    "blanks": " " * _LONG,
    "digits": "9" * _LONG,
    "backslashes": "\\\n" * (_LONG // 2),
    "quotes": "'" * _LONG,
    "commands of notebooks": "!a\n" * (_LONG // 6),
    "questions": "a?\n" * (_LONG // 6),
    "brackets": "[" * (_LONG // 2) + "]" * (_LONG // 2),
    "attributes": "a." * (_LONG // 2) + "=!x",
    "fences": "```\n" * (_LONG // 4),
    "openings": "<tool_call>{" * (_LONG // 12),
    "escapes": "\x1b[" * (_LONG // 12),
    "numbers": "1, " * (_LONG // 3),
}
FILES = {
    "letters": "'a' * (8 << 20)",
    "line breaks": "'\\n' * (8 << 20)",
    "lines": "'ab\\n' * (2 << 20)",
    "no text": "'\\udcff' * (8 << 20)",
    "too long": "'a' * (60 << 20)",
}
EDITS = {
    "view": {},
    "view of a line": {"command": "view", "view_range": [1, 1]},
    "one letter": {"command": "str_replace", "old_str": "a", "new_str": "b"},
    "a line break": {"command": "str_replace", "old_str": "\n", "new_str": ""},
    "a long text": {"command": "str_replace", "old_str": "a" * _LONG, "new_str": ""},
    "an absent text": {"command": "str_replace", "old_str": "ab" * 50_000 + "c", "new_str": ""},
    "insert": {"command": "insert", "insert_line": 1, "new_str": "\n" * 100_000},
    "undo": {"command": "undo_edit"},
}
PROGRAMS = {
    "output of letters": "print('a' * (8 << 20))",
    "output of lines": "print('\\n' * (8 << 20))",
    "output of bytes": "import sys; sys.stdout.buffer.write(b'\\xff' * (8 << 20))",
    "output of escapes": "print('\\x1b[' * (4 << 20))",
    "marks of figures": "print('\\x1dfigure 1\\x1d' * (1 << 19))",
    "many writes": "import os\nfor i in range(100_000): os.write(1 + i % 2, b'x')",
}
FLOODS = ("yes", "cat /dev/zero", r"yes $'\033]0;x'", r"yes $'\036abc:12:'", r"yes $'a\b\r'", r"yes $'\b' | tr -d '\n'")
SUMS = ("factorial(3000)", "exp(9)", "ln(1.1)", "1.1**2222.2", "9**9999**0.99", "log(2,1.0000001)")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ToolSet]:
    root: Path = tmp_path_factory.mktemp("databases")
    with sqlite3.connect(root / "a.sqlite") as database:
        database.execute("create table t(a)")
        database.executemany("insert into t values(?)", [("x" * 1000,)] * 2000)
    database.close()
    workspace = {"workers": 1, "warm_modules": (), "timeout_seconds": 1.5}
    made: list[Tool] = [
        *(kind(**workspace) for kind in (IPythonCodeTool, BashTerminalTool, StrReplaceEditorTool)),
        SqlTool(root=root, timeout_seconds=1.0, max_rows=10_000, max_output_length=1_000_000),
        *load_tools(",".join(PLAIN)),
    ]
    toolset = ToolSet(made, call_timeout_seconds=60.0)
    await toolset.start()
    yield toolset
    await toolset.close(grace_seconds=1.0)


async def act(tools: ToolSet, trajectory: str, action: str, **extra: object) -> StepResult:
    (result,) = await tools.step([StepRequest(trajectory, action, None, extra={"db_id": "a", **extra})])
    return result


def written(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


async def check(
    tools: ToolSet, name: str, action: str, *, trajectory: str = "hostile", direct: bool = True
) -> StepResult:
    """Run a hostile action beside an honest one, and see that neither the loop nor that one waits."""
    await act(tools, "honest", "<python>x = 1</python>")
    with longest_callback() as longest:
        hostile = asyncio.ensure_future(act(tools, trajectory, action, **({DIRECT_FIELD: True} if direct else {})))
        await asyncio.sleep(0.02)
        began = time.monotonic()
        honest = await act(tools, "honest", "<python>x + 1</python>")
        waited = time.monotonic() - began
        result = await hostile
    assert "2" in honest.observation
    assert waited < HONEST_SECONDS, name
    assert longest[0] < MAX_CALLBACK_SECONDS, f"{name}: one callback took {longest[0]:.3f} s"
    assert result.fault is None or result.fault.kind in (FaultKind.TIMEOUT, FaultKind.MISCONFIGURED), result.fault
    return result


async def test_every_tool_of_the_catalogue_is_driven(tools: ToolSet) -> None:
    called = {name for name in known_tools() if not any(kind.is_environment for kind in tool_classes(name))}
    assert {tool.name for tool in tools.tools} | SERVICES == called


@pytest.mark.parametrize("name", TEXTS)
async def test_arguments(tools: ToolSet, name: str) -> None:
    for tool in tools.tools:
        fields = list(tool.parameters.get("properties", {})) or ["input"]
        for field in fields[:3]:
            await check(
                tools, f"{tool.name}({field}={name})", written(tool.name, **{field: TEXTS[name]}), trajectory=tool.name
            )
    for tag in ("python", "bash", "calculator", "str_replace_editor", "sql"):
        await check(tools, f"<{tag}>{name}", f"<{tag}>{TEXTS[name]}</{tag}>", direct=False)
    await check(tools, name, TEXTS[name], direct=False)


async def test_actions_and_calls_have_a_longest_length(tools: ToolSet) -> None:
    for direct in (True, False):
        result = await check(tools, "long action", written("finish", x="a" * MAX_ACTION_CHARACTERS), direct=direct)
        assert "characters, and at most" in result.observation
        assert not result.valid
    result = await check(tools, "long call", written("ipython_code", code="1" * MAX_CALL_CHARACTERS + "1"))
    assert "split it into several" in result.observation


@pytest.mark.parametrize("name", FILES)
async def test_edits_of_large_files(tools: ToolSet, name: str) -> None:
    code = f"n = open('f', 'w', newline='', errors='surrogateescape').write({FILES[name]})"
    await act(tools, name, written("ipython_code", code=code), **{DIRECT_FIELD: True})
    for edit, arguments in EDITS.items():
        action = written("str_replace_editor", **{"command": "view", "path": "f", **arguments})
        await check(tools, f"{edit} of {name}", action, trajectory=name)
    await tools.step([StepRequest(name, "", None, finish=True)])


@pytest.mark.parametrize("name", PROGRAMS)
async def test_output_of_programs(tools: ToolSet, name: str) -> None:
    for tool in ("ipython_code", "python_code"):
        await check(tools, name, written(tool, code=PROGRAMS[name]))


@pytest.mark.parametrize("command", FLOODS)
async def test_floods_of_a_terminal(tools: ToolSet, command: str) -> None:
    await check(tools, command, written("bash_terminal", command=command, seconds=1.5), trajectory=command)


@pytest.mark.parametrize("term", SUMS)
async def test_many_calculations(tools: ToolSet, term: str) -> None:
    expression = "+".join([term] * (1000 // (len(term) + 1)))
    await check(tools, term, f"<calculator>{expression}</calculator>" * 100, direct=False)


async def test_results_of_queries(tools: ToolSet) -> None:
    for query in (
        "select * from t",
        "select printf('%.*c', 8000000, 'x')",
        "select " + ",".join(["1"] * 2000),
        "select printf('%.*c', 200, 'x') from t, t b limit 10000",
        "select count(*) from t a, t b, t c",
    ):
        await check(tools, query, written("sql", query=query))
