"""Against the real sandbox; one pool for the whole file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.servers.tools.actions import results, text
from verl_tool.errors import ConfigError, IsolationError, SandboxError, ToolFault
from verl_tool.servers.tools.base import InvalidCall
from verl_tool.servers.tools.python_code import NO_OUTPUT, PythonCodeTool, cut_middle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool() -> AsyncIterator[PythonCodeTool]:
    made = PythonCodeTool(
        workers=1,
        timeout_seconds=2,
        max_memory_mb=256,
        max_output_length=200,
        pre_import=("math", "import numpy as np"),
        restricted_functions=("os.system",),
    )
    await made.start()
    yield made
    await made.close()


@pytest.mark.parametrize("action", PythonCodeTool.example_actions)
async def test_every_example_action_is_answered(tool: PythonCodeTool, action: str) -> None:
    assert await text(tool, action) == "2"


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        ("\nprint(1)\n", "1"),
        (" print(1)\nprint(2)", "1\n2"),
        ("\n    x = 1\n    print(x)\n", "1"),
        ("```python\nprint(3)\n```", "3"),
        ("print('''a\n b''')", "a\n b"),
        ("", NO_OUTPUT),
        ("x = 1", NO_OUTPUT),
        ("print('é ✓')", "é ✓"),
    ],
)
async def test_payloads(tool: PythonCodeTool, payload: str, answer: str) -> None:
    assert await text(tool, f"<python>{payload}</python>") == answer


async def test_blocks_that_follow_one_another_are_one_program(tool: PythonCodeTool) -> None:
    action = "```python\nx = 20\n```\nand\n```python\nprint(x + 1)\n```\n"
    assert await text(tool, action) == "21"


async def test_json_calls_are_programs_of_their_own(tool: PythonCodeTool) -> None:
    call = '<tool_call>{"name": "python_code", "arguments": {"code": "%s"}}</tool_call>'
    first, second = await results(tool, call % "x = 1" + call % "print(x)")
    assert first.text == NO_OUTPUT
    assert second.text.endswith("NameError: name 'x' is not defined")


async def test_nothing_is_kept_from_turn_to_turn(tool: PythonCodeTool) -> None:
    await text(tool, "<python>x = 1</python>")
    assert "NameError" in await text(tool, "<python>print(x)</python>")


async def test_text_that_is_no_unicode_is_answered_with_pythons_own_error(tool: PythonCodeTool) -> None:
    assert "SyntaxError" in await text(tool, "<python>print('\ud800')</python>")


async def test_stdin_comes_from_the_extra_field_or_the_call(tool: PythonCodeTool) -> None:
    program = "<python>print(input() + '!')</python>"
    assert await text(tool, program, {"stdin": "hey\n"}) == "hey!"
    assert "EOFError" in await text(tool, program)
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(input())", "stdin": "own"}}</tool_call>'
    assert await text(tool, call, {"stdin": "other"}) == "own"
    with pytest.raises(ToolFault, match="the extra field 'stdin' is a list; send a string"):
        await text(tool, program, {"stdin": ["hey"]})


async def test_an_error_comes_behind_the_output_and_names_no_path_of_the_host(tool: PythonCodeTool) -> None:
    [result] = await results(tool, "<python>print('before')\n1 / 0</python>")
    assert result.error
    assert result.valid
    lines = result.text.splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert 'File "main.py", line 2, in <module>' in result.text
    assert "/" not in result.text.replace("1 / 0", "")


async def test_stderr_is_told(tool: PythonCodeTool) -> None:
    assert await text(tool, "<python>import sys; print('odd', file=sys.stderr)</python>") == "odd"


async def test_a_timeout_says_so_with_the_limit_and_what_was_written(tool: PythonCodeTool) -> None:
    [result] = await results(tool, "<python>print('on', flush=True)\nwhile True: pass</python>")
    assert result.text == "on\nExecution timed out: it ran longer than 2 seconds."
    assert result.error
    assert (result.metrics["timed_out"], result.metrics["error"]) == (1.0, 1.0)


async def test_too_much_memory_says_so_with_the_limit(tool: PythonCodeTool) -> None:
    answer = await text(tool, "<python>x = bytearray(1 << 30)</python>")
    assert answer.endswith("MemoryError\nMemory limit exceeded: a program may use 256 MB.")


async def test_exit_codes_and_signals_are_told(tool: PythonCodeTool) -> None:
    assert await text(tool, "<python>import sys; sys.exit(3)</python>") == "Exit code: 3"
    assert await text(tool, "<python>import sys; sys.exit('bad input')</python>") == "bad input"
    ended = await text(tool, "<python>import os; os.kill(os.getpid(), 11)</python>")
    assert ended == "Execution was ended by signal 11 (SIGSEGV)."


async def test_long_output_loses_its_middle(tool: PythonCodeTool) -> None:
    answer = await text(tool, "<python>print('a' * 500 + 'b' * 500)\nraise ValueError('end')</python>")
    assert answer.startswith("a" * 100 + "\n[... ")
    assert answer.endswith("ValueError: end")
    assert len(answer) < 300


async def test_output_beyond_what_the_sandbox_keeps_is_counted(tool: PythonCodeTool) -> None:
    answer = await text(tool, "<python>print('a' * (3 << 20))</python>")
    assert f"[{(2 << 20) + 1} more bytes were written and not kept]" in answer


async def test_pre_imports_are_done(tool: PythonCodeTool) -> None:
    assert await text(tool, "<python>print(np.arange(3), math.floor(2.5))</python>") == "[0 1 2] 2"


async def test_a_restricted_function_is_refused_in_words(tool: PythonCodeTool) -> None:
    [result] = await results(tool, "<python>import os\nos.system('id')</python>")
    assert result.error
    assert "os.system" in result.text


async def test_arguments_without_code_say_how_to_call(tool: PythonCodeTool) -> None:
    with pytest.raises(InvalidCall, match=r'{"code": "print\(1 \+ 1\)"}'):
        await results(tool, '<tool_call>{"name": "python_code", "arguments": {"cod": 1}}</tool_call>')


async def test_another_call_between_two_blocks_makes_them_two_programs(tool: PythonCodeTool) -> None:
    from verl_tool.servers.execution.calls import CallFinder
    from verl_tool.servers.tools import tool_class

    finder = CallFinder([tool, tool_class("calculator")()])
    action = "<python>a</python><calculator>1</calculator><python>b</python><python>c</python>"
    matched, _ = finder.find(action)
    assert [(match.tool.name, match.call.input) for match in matched] == [
        ("python_code", "a"),
        ("calculator", "1"),
        ("python_code", "b\nc"),
    ]


async def test_a_tool_that_was_not_started_is_a_fault() -> None:
    with pytest.raises(SandboxError, match="has not been started"):
        await text(PythonCodeTool(), "<python>1</python>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_seconds": 0}, "greater than 0"),
        ({"isolation": "best"}, "isolation level 'best' is unknown"),
        ({"pre_import": ["print(1)"]}, "not an import statement"),
        ({"allowed_modules": ["a b"]}, "is not a"),
        ({"max_output_length": "many"}, "option max_output_length is 'many'"),
    ],
)
async def test_wrong_options_are_refused_before_the_start(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PythonCodeTool(**options)
    assert words in str(caught.value)


async def test_timeout_is_a_short_name_of_timeout_seconds() -> None:
    assert PythonCodeTool(timeout=3).options.timeout_seconds == 3


async def test_without_bubblewrap_it_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(IsolationError):
        await PythonCodeTool(workers=1).start()


async def test_cutting_keeps_both_ends() -> None:
    assert cut_middle("abc", 3) == "abc"
    assert cut_middle("abcdefghij", 4) == "ab\n[... 6 characters left out ...]\nij"
