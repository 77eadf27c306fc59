"""Against the real sandbox; one pool for the whole file, a workspace for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.servers.tools.actions import results, text
from verl_tool.content.parts import TextPart
from verl_tool.errors import SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools.base import Context
from verl_tool.servers.tools.ipython_code import NO_OUTPUT, IPythonCodeTool
from verl_tool.servers.tools.workspace.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

CUT = "[... 3000 characters left out ...]"
Ask = Callable[[str], Awaitable[str]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool() -> AsyncIterator[IPythonCodeTool]:
    made = IPythonCodeTool(
        workers=1,
        timeout_seconds=20,
        max_output_length=2000,
        max_sessions=2,
        images=True,
        pre_import=("math",),
        warm_modules=(),
    )
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(tool: IPythonCodeTool) -> AsyncIterator[Workspace]:
    made = await tool.new_state(Context("t", 0, None))
    yield made
    await tool.close_state(made)


@pytest.fixture
def ask(tool: IPythonCodeTool, workspace: Workspace) -> Ask:
    return lambda code: text(tool, f"<python>{code}</python>", state=workspace)


async def test_every_example_action_is_answered(tool: IPythonCodeTool, workspace: Workspace) -> None:
    for action in IPythonCodeTool.example_actions:
        assert await text(tool, action, state=workspace) == "2"


async def test_names_files_and_the_last_value_stay(ask: Ask) -> None:
    assert await ask("import json\nx = [1]\nopen('f', 'w').write('kept')") == "4"
    assert await ask("x.append(math.floor(2.5))\njson.dumps(x)") == "'[1, 2]'"
    assert await ask("_, open('f').read()") == "('[1, 2]', 'kept')"
    assert await ask("y = 1") == NO_OUTPUT
    assert await ask("import asyncio\nawait asyncio.sleep(0, 'awaited')") == "'awaited'"


async def test_blocks_are_one_cell_unless_one_is_a_magic_of_its_own(
    tool: IPythonCodeTool, workspace: Workspace
) -> None:
    assert await text(tool, "```python\na = 1\n```\nso\n```python\na + 1\n```", state=workspace) == "2"
    first, second = await results(tool, "<python>a</python><python>%%bash\necho hi</python>", state=workspace)
    assert (first.text, second.text) == ("1", "hi")


async def test_a_traceback_has_the_users_lines_only(ask: Ask) -> None:
    await ask("!true")
    answer = await ask("def f():\n    return 1 / 0\nf()")
    assert '"<cell 2>", line 3' in answer
    assert answer.splitlines()[0] == "Traceback (most recent call last):"
    assert "return 1 / 0" in answer
    assert answer.endswith("ZeroDivisionError: division by zero")
    in_magic = await ask("%timeit 1 / 0")
    assert in_magic.endswith("ZeroDivisionError: division by zero")
    for shown in (answer, in_magic):
        assert "kernel" not in shown
        assert "verl_tool" not in shown


async def test_commands(ask: Ask) -> None:
    assert await ask("name = 'a b'\n!echo {name}$name; echo $HOME ${HOME} | tr '/' ':'; false") == (
        "a ba b\n:box:work :box:work"
    )
    assert await ask("_exit_code, 'x' if (lines := 1) else 0") == "(1, 'x')"
    assert await ask("found = !printf 'a\\nb\\n'\nfound") == "['a', 'b']"
    assert await ask("for i in range(2):\n    !echo {i}") == "0\n1"
    assert await ask("!echo '{print $1}' {a,b}") == "{print $1} a b"
    assert await ask("%%writefile new.txt\nline 1\n!ls") == "Writing new.txt"
    assert await ask("%cd /tmp\n%pwd") == "/box/tmp\n'/box/tmp'"
    assert await ask("!cat ~/new.txt") == "line 1\n!ls"


async def test_a_command_that_leaves_a_process_does_not_hold_the_cell(ask: Ask) -> None:
    answer = await ask("!sleep 100 & echo on")
    assert answer == "on\nProcesses left running by the cell were ended: 1."


async def test_time_and_names(ask: Ask) -> None:
    assert "per loop (mean ± std. dev. of 2 runs, 3 loops each)" in await ask("%timeit -n 3 -r 2 sum([1])")
    assert (await ask("%%time\nx = 5\nx + 1")).startswith("6\nCPU time: ")
    assert "Wall time: " in await ask("%time x")
    assert await ask("%who") == "math\t x"
    assert await ask("%reset -f\n%who") == "math"
    assert "NameError" in await ask("x")
    assert "Docstring: Return the floor" in await ask("math.floor?")
    assert "UsageError: Line magic function `%nosuch` not found" in await ask("%nosuch 1")


async def test_a_cell_that_is_ended_is_undone_and_says_so(tool: IPythonCodeTool, workspace: Workspace) -> None:
    quick = IPythonCodeTool(timeout_seconds=1)
    await text(tool, "<python>x = 1</python>", state=workspace)
    [result] = await results(quick, "<python>x = 2\nprint('on')\nwhile True: pass</python>", state=workspace)
    assert result.error
    assert result.text == (
        "on\nExecution timed out: it ran longer than 1 seconds.\n"
        "Variables and modules are as they were before this cell; what it wrote to files, shared memory, pipes and "
        "sockets remains."
    )
    assert await text(tool, "<python>x</python>", state=workspace) == "1"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\n1",
        "import os\nos.execv('/bin/true', ['true'])",
        "import builtins\ndel builtins.print, builtins.get_ipython",
        "import sys\nsys.exit(3)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "!kill -9 $PPID",
        "import os\nwhile True: os.fork()",
        "import sys\nsys.stdout.close()\nsys.stderr.close()",
        "import os\nfor fd in (0, 1, 2): os.close(fd)",
        "import sys\nsys.stdout.detach().detach()",
        "import sys\nwith open('f', 'w') as sys.stdout: print(1)",
        "import sys\ndel sys.stdout, sys.stderr",
    ],
)
async def test_a_hostile_cell_leaves_a_session_that_answers(tool: IPythonCodeTool, code: str) -> None:
    quick = IPythonCodeTool(timeout_seconds=2)
    workspace = await tool.new_state(Context("hostile", 0, None))
    try:
        await text(tool, "<python>!true</python>", state=workspace)
        await text(quick, f"<python>{code}</python>", state=workspace)
        for cell in (
            "6 * 7",
            "import sys\n6 * 7",
            "print(6 * 7, file=sys.__stdout__)",
            "import os\nos.system('echo 42')\nNone",
        ):
            if "builtins.print" in code and "print" in cell:
                continue
            assert await text(tool, f"<python>{cell}</python>", state=workspace) == "42"
    finally:
        await tool.close_state(workspace)


async def test_output_without_end_is_cut(tool: IPythonCodeTool, workspace: Workspace) -> None:
    for code in ("!head -c 100000000 /dev/zero | tr '\\0' a", "print('a' * 100_000_000)"):
        answer = await text(tool, f"<python>{code}</python>", state=workspace)
        assert "characters left out" in answer
        assert len(answer) < 2500


async def test_figures_are_images_where_the_cell_shows_them(tool: IPythonCodeTool, workspace: Workspace) -> None:
    pytest.importorskip("matplotlib")
    setup = (
        "import matplotlib.pyplot as plt\ndef draw(color):\n    plt.figure(figsize=(1, 1), facecolor=color)\n"
        "    plt.axis('off')\n"
    )

    async def seen(code: str, by: IPythonCodeTool = tool) -> list[object]:
        """Texts, and of each figure the colour of its corner."""
        [result] = await results(by, f"<python>{code}</python>", state=workspace)
        parts = result.parts or [TextPart(result.text)]
        return [each.text if isinstance(each, TextPart) else each.decode().getpixel((0, 0)) for each in parts]

    red, blue, lime = (255, 0, 0), (0, 0, 255), (0, 255, 0)
    cell = f"{setup}print(1)\ndraw('red')\nplt.show()\nprint(2)\ndraw('blue')\nplt.show()\ndraw('lime')\n3"
    assert await seen(cell) == ["1\n", red, "2\n", blue, "3", lime]
    assert await seen("draw('red')") == [red]
    assert await seen("draw('red'); plt.show(); print('a' * 5000)") == [f"{'a' * 1000}\n{CUT}\n{'a' * 1000}", red]
    assert await seen("1") == ["1"]
    assert await seen("for n in range(9): draw('red')") == [*[red] * 8, "[9 figures were drawn; 8 of them are shown]"]
    assert await seen("print('\\x1dfigure 0\\x1d'); draw('blue')") == [blue]
    told = "[1 figure was drawn, and cannot be shown here; print what you want to know of it]"
    assert await seen("draw('red'); plt.show()", IPythonCodeTool()) == [told]
    broken = "open('/dev/shm/.figures/0.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n')"
    assert await seen(f"draw('red'); plt.show(); {broken}") == [f"8\n{told}"]
    lost = await text(tool, "<python>import os\nos.kill(os.getppid(), 9)</python>", state=workspace)
    assert "All variables are lost" in lost
    assert await seen(cell) == ["1\n", red, "2\n", blue, "3", lime]


async def test_rich_results_are_text(ask: Ask) -> None:
    assert await ask("from IPython.display import Markdown, display\ndisplay(Markdown('**a**'), 5)") == "**a**\n5"


async def test_one_session_too_many_and_a_lost_one_are_faults(tool: IPythonCodeTool) -> None:
    first, second = [await tool.new_state(Context(name, 0, None)) for name in "ab"]
    with pytest.raises(ToolFault) as caught:
        await tool.new_state(Context("c", 0, None))
    assert caught.value.kind is FaultKind.OVERLOADED
    await tool.close_state(first)
    second.session.evict("a test")
    with pytest.raises(ToolFault) as caught:
        await text(tool, "<python>1</python>", state=second)
    assert caught.value.kind is FaultKind.STATE_LOST
    await tool.close_state(second)


async def test_a_tool_that_was_not_started_makes_no_workspace() -> None:
    with pytest.raises(SandboxError, match="ipython_code has not been started"):
        await IPythonCodeTool().new_state(Context("t", 0, None))


async def test_the_names_that_both_python_tools_have_are_those_of_the_one_without_state() -> None:
    assert tool_class("python").name == "python_code"
    assert tool_class("ipython") is IPythonCodeTool
