from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_tool.errors import ConfigError
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import inactive_tools, known_tools, load_tools, tool_class
from verl_tool.servers.tools.python_code import PythonCodeTool

DATA = Path(__file__).parent / "data"
BUNDLES = {"pixel_reasoner": ["zoom_in", "select_frames"]}
"""Files that hold several tools."""


def names(spec: str, config: object = None) -> list[str]:
    return [tool.name for tool in load_tools(spec, ToolConfig.parse(config or {}))]


def test_tools_come_in_the_order_asked_for() -> None:
    assert names("finish, python_code,calculator") == ["finish", "python_code", "calculator"]


def test_a_path_loads_a_users_file() -> None:
    assert names(f"calculator,{DATA / 'reverse.py'}") == ["calculator", "reverse"]


def test_a_file_may_hold_several_typed_tools() -> None:
    several = str(DATA / "several.py")
    assert names(several) == ["double", "half"]
    assert names(f"{DATA / 'cart.py'},finish") == ["add", "show", "remove", "finish"]
    with pytest.raises(ConfigError, match="holds several tools: double, half; one is wanted here"):
        tool_class(several)
    with pytest.raises(ConfigError, match="tool 'double' is named more than once"):
        names(f"{several},{several}")


def test_an_entry_of_the_config_is_for_all_tools_of_its_file() -> None:
    config = {"tools": [{"name": str(DATA / "several.py"), "formats": ["hermes"]}]}
    tools = load_tools("", ToolConfig.parse(config))
    assert [(tool.name, [fmt.name for fmt in tool.formats]) for tool in tools] == [
        ("double", ["hermes"]),
        ("half", ["hermes"]),
    ]


def test_an_alias_of_a_built_in_tool_loads_it() -> None:
    assert names("SimpleCalculatorTool") == ["calculator"]


def test_every_file_of_the_folder_is_a_tool_of_its_name() -> None:
    for name in known_tools():
        tools = load_tools(name)
        assert [tool.name for tool in tools] == BUNDLES.get(name, [name])
        for tool in tools:
            assert tool.description
            for action in tool.example_actions:
                assert tool.recognise(action), f"{name} does not recognise its own example {action!r}"


def test_an_entry_point_loads_an_installed_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "fancy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[verl_tool.tools]\nfancy = verl_tool.servers.tools.calculator:calculator\n"
        "broken = verl_tool.servers.tools.calculator:CalculatorOptions\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(load_tools("fancy")[0]) is tool_class("calculator")
    assert {"fancy", "calculator"} <= set(known_tools())
    with pytest.raises(ConfigError, match=r"entry point 'broken' of verl_tool.tools is .*must be a class"):
        load_tools("broken")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "pyton_code",
            "tool 'pyton_code' is unknown; known: audio_crop, bash_terminal, bfcl, bing_search, browser, calculator,",
        ),
        ("", "no tool is named; known: audio_crop, bash_terminal, bfcl, bing_search, browser, calculator,"),
        ("calculator,calc", "tool 'calculator' is named more than once"),
        ("base", "tool 'base' is unknown"),
        ("_arithmetic", "tool '_arithmetic' is unknown"),
        ("nowhere.py", "there is no file"),
    ],
)
def test_what_cannot_be_loaded_is_named(spec: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools(spec)
    assert words in str(caught.value)


CLASS = "class {0}(Tool):\n    name = '{0}'\n    description = 'd'\n    async def run(self, call, context): ...\n"
TYPED = (
    "from __future__ import annotations\nfrom verl_tool.servers.tools import tool\n"
    "@tool\ndef double(number: int) -> int:\n    'Doubles it.'\n"
)
IMPORT = "from verl_tool.servers.tools.base import Tool\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1\n", "or exactly one class that extends Tool and has run(); found: none"),
        (IMPORT + "class A(Tool): name = 'a'\n", "found: none"),
        (IMPORT + CLASS.format("A") + CLASS.format("B"), "found: A, B"),
        (IMPORT + CLASS.format("A").replace("description = 'd'", "pass"), "has description=None; give it a text"),
        (TYPED + IMPORT + CLASS.format("A"), "found: A, double"),
        (TYPED.replace("int", "Int"), "the types of tool double cannot be read: name 'Int' is not defined"),
        (
            TYPED.replace("@tool\n", "class Math:\n  @tool\n  ").replace("    '", "   '"),
            "Math has methods decorated with @tool; let it extend",
        ),
        ("raise OSError('no disk')\n", "cannot be imported: OSError: no disk"),
    ],
)
def test_a_file_without_just_one_tool_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tools(str(path))
    assert words in str(caught.value)


def test_a_file_may_import_another_tool_and_extend_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from verl_tool.servers.tools.python_code import PythonCodeTool\n"
        "class Mine(PythonCodeTool):\n    name = 'mine'\n    aliases = ()\n"
    )
    assert names(str(path)) == ["mine"]


def test_shared_options_go_to_the_tools_that_have_them() -> None:
    python, calculator = load_tools("python_code,calculator", shared={"workers": 3, "isolation": "none"})
    assert isinstance(python, PythonCodeTool)
    assert (python.options.workers, python.options.isolation) == (3, "none")
    assert calculator.name == "calculator"


def test_inactive_tools_are_told_with_the_reason() -> None:
    config = ToolConfig.parse({"tools": [{"name": "calculator", "enabled": False}]})
    inactive = {tool.name: tool.why for tool in inactive_tools(load_tools("finish", config), config)}
    assert inactive["calculator"] == "disabled in the tool config"
    assert inactive["python_code"] == "not in --tool_type"
    assert "finish" not in inactive


def test_importing_the_package_imports_no_tool_and_nothing_heavy() -> None:
    code = (
        "import sys, verl_tool.servers.tools as t\n"
        "tools = {m.split('.')[3] for m in sys.modules if m.startswith('verl_tool.servers.tools.')}\n"
        "print(tools - {'base', 'typed'})\n"
        "print([m for m in ('torch', 'transformers', 'verl', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["set()", "[]"]
