"""The command-line checks, run against a real server in this process."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import typer
from databases import make_singers
from live_server import LiveServers
from piston_service import PistonService
from search_providers import Pages, Providers
from typer.testing import CliRunner

from verl_tool.protocol import FaultKind
from verl_tool.servers.tests import live_check
from verl_tool.servers.tests import test_audio_crop_tool as audio_check
from verl_tool.servers.tests import test_bash_terminal_tool as bash_check
from verl_tool.servers.tests import test_calculator_tool as calculator_check
from verl_tool.servers.tests import test_draw_tool as draw_check
from verl_tool.servers.tests import test_finish_tool as finish_check
from verl_tool.servers.tests import test_ipython_code_tool as ipython_check
from verl_tool.servers.tests import test_measure_tool as measure_check
from verl_tool.servers.tests import test_piston_tool as piston_check
from verl_tool.servers.tests import test_pixel_reasoner_tool as pixel_check
from verl_tool.servers.tests import test_python_code_tool as python_check
from verl_tool.servers.tests import test_python_oj_tool as oj_check
from verl_tool.servers.tests import test_rotate_tool as rotate_check
from verl_tool.servers.tests import test_sandbox_fusion_tool as fusion_check
from verl_tool.servers.tests import test_select_frames_tool as frames_check
from verl_tool.servers.tests import test_sql_tool as sql_check
from verl_tool.servers.tests import test_str_replace_editor_tool as editor_check
from verl_tool.servers.tests import test_web_page_tool as page_check
from verl_tool.servers.tests import test_web_search_tool as web_check
from verl_tool.servers.tests import test_zoom_in_tool as zoom_check
from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, one_by_one, run_cases, together
from verl_tool.servers.tools import load_tools, tool_class
from verl_tool.servers.tools.base import Tool, ToolResult
from verl_tool.servers.tools.finish import FinishTool
from verl_tool.servers.tools.python_code import PythonCodeTool
from verl_tool.servers.tools.sql import SqlTool

pytestmark = pytest.mark.slow


async def problems(servers: LiveServers, tools: Sequence[Tool], name: str, cases: Sequence[LiveCase]) -> dict[str, str]:
    """The cases that fail, and why."""
    live = await servers.start(tools)
    outcomes = await run_cases(live.observations_url, None, name, cases)
    assert len(outcomes) == len(cases)
    return {outcome.case.name: outcome.problem for outcome in outcomes if outcome.problem is not None}


async def cli(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command line, run beside the server's loop."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


async def test_the_calculator_holds(servers: LiveServers) -> None:
    assert await problems(servers, [tool_class("calculator")()], "calculator", calculator_check.CASES) == {}


async def test_finish_holds(servers: LiveServers) -> None:
    assert await problems(servers, [FinishTool()], "finish", finish_check.CASES) == {}


async def test_python_code_holds(servers: LiveServers) -> None:
    tool = PythonCodeTool(workers=2, timeout_seconds=5, max_memory_mb=512)
    assert await problems(servers, [tool], "python_code", python_check.CASES) == {}


@pytest.mark.parametrize(
    ("name", "check"),
    [("ipython_code", ipython_check), ("bash_terminal", bash_check), ("str_replace_editor", editor_check)],
)
async def test_tools_with_a_workspace_hold(servers: LiveServers, name: str, check: ModuleType) -> None:
    tool = tool_class(name)(workers=1, warm_modules=(), timeout_seconds=3)
    assert await problems(servers, [tool], name, check.CASES) == {}


async def test_sql_holds(servers: LiveServers, tmp_path: Path) -> None:
    make_singers(tmp_path)
    tool = SqlTool(root=tmp_path, timeout_seconds=1, workers=2)
    assert await problems(servers, [tool], "sql", sql_check.cases("singers")) == {}


async def test_python_oj_holds(servers: LiveServers) -> None:
    tool = tool_class("python_oj")(workers=1, test_seconds=1)
    assert await problems(servers, [tool], "python_oj", oj_check.CASES) == {}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("zoom_in", zoom_check),
        ("select_frames", frames_check),
        ("rotate", rotate_check),
        ("draw", draw_check),
        ("measure", measure_check),
    ],
)
async def test_tools_for_images_hold(servers: LiveServers, name: str, check: ModuleType) -> None:
    assert await problems(servers, load_tools(name), name, check.CASES) == {}


async def test_pixel_reasoner_holds(servers: LiveServers) -> None:
    assert await problems(servers, load_tools("pixel_reasoner"), "zoom_in", pixel_check.CASES) == {}


async def test_audio_crop_holds(servers: LiveServers) -> None:
    assert await problems(servers, [tool_class("audio_crop")()], "audio_crop", audio_check.CASES) == {}


async def test_sandbox_fusion_holds(servers: LiveServers) -> None:
    behind = await servers.start([PythonCodeTool(workers=1)])
    tool = tool_class("sandbox_fusion")(url=behind.url, timeout_seconds=1)
    assert await problems(servers, [tool], "sandbox_fusion", fusion_check.CASES) == {}


async def test_piston_holds(servers: LiveServers) -> None:
    async with PistonService() as service:
        tool = tool_class("piston")(url=service.url, timeout_seconds=1)
        assert await problems(servers, [tool], "piston", piston_check.CASES) == {}


async def test_web_search_holds(servers: LiveServers) -> None:
    async with Providers() as providers:
        tool = tool_class("web_search")(provider="searxng", url=providers.url)
        assert await problems(servers, [tool], "web_search", web_check.CASES) == {}
        assert len(providers.asked) == 2, "each query is asked once"


async def test_web_page_holds(servers: LiveServers) -> None:
    async with Pages() as pages:
        tool = tool_class("web_page")(allow_private_addresses=True, workers=1)
        assert await problems(servers, [tool], "web_page", page_check.cases(f"{pages.url}/article", private=True)) == {}
        refusing = tool_class("web_page")(workers=1)
        [private] = page_check.cases("https://a.example")[-1:]
        assert await problems(servers, [refusing], "web_page", [private]) == {}


class WrongCalculator(tool_class("calculator")):
    """Says that everything is 0."""

    async def run(self, call, context):
        return ToolResult("0")


COMMON_TO_ALL = {
    "text without a call is not valid",
    "talk of finishing does not",
    "finish=true from the trainer, twice",
    "a broken tool call says why",
}
"""What every tool server answers rightly, whatever its tools do."""
CHECKS = sorted(path.stem for path in Path(live_check.__file__).parent.glob("test_*_tool.py"))


@pytest.mark.parametrize("name", CHECKS)
async def test_every_case_fails_at_a_tool_that_talks_nonsense(servers: LiveServers, name: str) -> None:
    module = importlib.import_module(f"verl_tool.servers.tests.{name}")
    tool_name = name.removeprefix("test_").removesuffix("_tool").replace("pixel_reasoner", "zoom_in")
    tool = type("Nonsense", (WrongCalculator,), {"name": tool_name, "call_names": (tool_name,)})()
    cases = module.CASES if hasattr(module, "CASES") else module.cases("nothing")
    failed = await problems(servers, [tool], tool_name, cases)
    assert {case.name for case in cases} - set(failed) <= COMMON_TO_ALL


async def test_a_wrong_tool_fails_with_a_table_and_exit_code_1(servers: LiveServers) -> None:
    live = await servers.start([WrongCalculator()])
    code, output = await cli(calculator_check.app, "calculator", f"--url={live.observations_url}")
    assert code == 1
    assert "arithmetic" in output
    assert "fails" in output
    assert f"of {len(calculator_check.CASES)} hold" in output


async def test_a_right_tool_exits_0(servers: LiveServers) -> None:
    live = await servers.start([FinishTool()], api_key="s3cret")
    code, output = await cli(finish_check.app, "finish", f"--url={live.url}", "--api_key=s3cret")
    assert (code, "all 4 hold" in output) == (0, True)


async def test_no_server_is_one_clear_message_and_exit_code_2() -> None:
    code, output = await cli(python_check.app, "python", "--url=http://127.0.0.1:9/get_observation")
    assert code == 2
    assert "No tool server answers at http://127.0.0.1:9/get_observation" in output
    assert "python -m verl_tool.servers.ray_serve --tool_type python_code" in output


async def test_a_server_without_the_tool_says_what_it_has(servers: LiveServers) -> None:
    live = await servers.start([FinishTool()])
    code, output = await cli(calculator_check.app, "calculator", f"--url={live.url}")
    assert code == 2
    assert "has no tool 'calculator'; it serves: finish" in " ".join(output.split())


async def test_a_case_has_a_deadline_and_every_kind_of_failure_is_described(servers: LiveServers) -> None:
    slow = tool_class("python_code")(workers=1, timeout_seconds=5)
    endless = LiveCase("hang", one_by_one(LiveTurn("<python>while True: pass</python>")), 0.1)
    found = await problems(servers, [slow], "python_code", [endless, LiveCase("nothing", one_by_one(), 30.0)])
    assert found["hang"] == "no answer within 0.1 s"


FINISH = "<finish>1</finish>"
FAILURES = {
    "'nowhere' is missing": one_by_one(LiveTurn(FINISH, ("nowhere",))),
    "re.compile('nowhere') is missing": one_by_one(LiveTurn(FINISH, (re.compile("nowhere"),))),
    "'tool' stands in the answer": one_by_one(LiveTurn("hello", lacks=("tool",), valid=False)),
    "valid=False in the answer": one_by_one(LiveTurn("hello")),
    "valid=True in the answer": one_by_one(LiveTurn(FINISH, valid=False)),
    "done=True in the answer": one_by_one(LiveTurn(FINISH, done=False)),
    "fault None; expected ": one_by_one(LiveTurn(FINISH, fault=FaultKind.MISCONFIGURED)),
    "no such picture in the answer": one_by_one(LiveTurn(FINISH, problem=lambda result: "no such picture")),
    "nothing was asked": one_by_one(),
}


@pytest.mark.parametrize("words", FAILURES)
async def test_every_expectation_can_fail(servers: LiveServers, words: str) -> None:
    found = await problems(servers, [FinishTool()], "finish", [LiveCase("case", FAILURES[words])])
    assert words in found["case"]


async def test_answers_are_compared_with_each_other(servers: LiveServers) -> None:
    turns = together(LiveTurn(FINISH), LiveTurn("hello", valid=False))
    case = LiveCase("alike", turns, holds=lambda answers: answers[0] == answers[1])
    assert "do not fit together" in (await problems(servers, [FinishTool()], "finish", [case]))["alike"]
