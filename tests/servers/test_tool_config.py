from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.servers.tools.actions import results, text
from verl_tool.errors import ConfigError
from verl_tool.protocol import StepRequest
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.python_code import PythonCodeTool

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_config.json"


def python_code(content: object) -> PythonCodeTool:
    [tool] = load_tools("python_code", ToolConfig.parse(content))
    assert isinstance(tool, PythonCodeTool)
    return tool


def test_the_example_sets_what_it_says() -> None:
    config = ToolConfig.from_file(EXAMPLE)
    [tool] = load_tools("", config)
    assert isinstance(tool, PythonCodeTool)
    options = tool.options
    assert options.description == "Executes Python code and returns what it prints."
    assert (options.timeout_seconds, options.max_output_length, options.workers) == (10, 1000, 2)
    assert options.allowed_modules is not None
    assert "numpy" in options.allowed_modules
    assert "eval" in options.restricted_functions
    assert options.max_memory_mb == 1024
    assert config.execution.max_tools_per_generation == 4


@pytest.mark.timeout(60)
async def test_the_examples_security_section_is_in_force() -> None:
    [tool] = load_tools("", ToolConfig.from_file(EXAMPLE), shared={"workers": 1})
    await tool.start()
    try:
        assert await text(tool, "<PYTHON>print(np.sum([1, 2]), math.sqrt(4))</PYTHON>") == "3 2.0"
        assert await text(tool, "<PYTHON>import json, collections; print(json.dumps([1]))</PYTHON>") == "[1]"
        for code, words in (
            ("import socket", "module 'socket' is not allowed here"),
            ("eval('1')", "eval is not allowed here"),
            ("open('/etc/passwd')", "open is not allowed here"),
            ("compile('1', 'a', 'eval')", "compile is not allowed here"),
            ("__import__('math')", "__import__ is not allowed here"),
            ("input()", "input is not allowed here"),
        ):
            [result] = await results(tool, f"<PYTHON>{code}</PYTHON>")
            assert result.error, code
            assert words in result.text.splitlines()[-1]
    finally:
        await tool.close()


def test_tags_become_the_first_format() -> None:
    tags = {"start_tag": "[[py]]", "end_tag": "[[/py]]", "output_start_tag": "[[out]]", "output_end_tag": "[[/out]]"}
    tool = python_code({"tools": {"python": tags}})
    [call] = tool.recognise("[[py]]print(1)[[/py]]")
    assert call.format.render("1", call) == "\n[[out]]\n1\n[[/out]]\n"


def test_serial_execution_is_one_run_at_a_time() -> None:
    assert python_code({"execution": {"parallel_execution": False}}).options.max_concurrent == 1
    assert python_code({"execution": {"parallel_execution": True}}).options.max_concurrent is None


async def test_calls_beyond_the_greatest_number_are_refused_in_words() -> None:
    config = ToolConfig.parse({"execution": {"max_tools_per_generation": 1}})
    toolset = ToolSet(load_tools("calculator", config), max_calls=config.execution.max_tools_per_generation)
    await toolset.start()
    try:
        action = "<calculator>1+1</calculator> <calculator>2+2</calculator>"
        [result] = await toolset.step([StepRequest("t", action)])
    finally:
        await toolset.close()
    first, second = (part.strip() for part in result.observation.replace("</result>", "").split("<result>")[1:])
    assert first == "2"
    assert second == "Error: at most 1 call of one turn are run; this one was not. Send it in your next turn."
    assert result.valid


def test_a_tools_own_entry_wins_over_the_sections() -> None:
    config = {"tools": [{"name": "python", "timeout_seconds": 3}], "execution": {"timeout_seconds": 7}}
    assert python_code(config).options.timeout_seconds == 3
    assert python_code({"execution": {"timeout_seconds": 7}}).options.timeout_seconds == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"toolz": []}, "unknown key 'toolz'; known here: execution, security, tools"),
        (
            {"execution": {"max_retries": 1}},
            "unknown key 'execution.max_retries'; known here: max_tools",
        ),
        ({"security": {"sandbox": 1}}, "unknown key 'security.sandbox'; known here: allowed_modules"),
        ({"tools": [{"name": "python_code", "timout": 3}]}, "tool python_code has no option 'timout'; known: "),
        ({"tools": [{"name": "calculator", "enabled": False, "digts": 3}]}, "tool calculator has no option 'digts'"),
        ({"tools": [{"name": "pyton"}]}, "tool 'pyton' is unknown"),
        ({"tools": [{"enabled": True}]}, "'tools.0.name' is missing"),
        ({"tools": [{"name": "calc"}, {"name": "calc"}]}, "calc stands there more than once"),
        ({"tools": [{"name": "calc"}, {"name": "calculator"}]}, "are one tool; give it one entry"),
        ({"tools": [{"name": "python_code", "enabled": False}]}, "is named but disabled in the tool config"),
        ({"tools": 3}, "tools is 3"),
        ({"execution": {"num_executors": 0}}, "execution.num_executors is 0"),
        ({"security": {"allowed_modules": "math"}}, "security.allowed_modules is 'math'"),
        ([], "the content is []"),
    ],
)
def test_what_is_wrong_is_named(content: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        python_code(content)
    assert words in str(caught.value)


def test_a_command_line_gives_a_file_or_the_text_itself(tmp_path: Path) -> None:
    text = '{"tools": [{"name": "sandbox_fusion", "url": "http://a//b"}]}'
    (tmp_path / "tools.json").write_text(text)
    for given in (text, f" {text}", str(tmp_path / "tools.json")):
        [entry] = ToolConfig.from_cli(given).tools
        assert (entry.name, entry.options()) == ("sandbox_fusion", {"url": "http://a//b"})
    with pytest.raises(ConfigError, match=r'tool config \{"tools": is not JSON'):
        ToolConfig.from_cli('{"tools":')
    with pytest.raises(ConfigError, match="unknown key 'tool'"):
        ToolConfig.from_cli('{"tool": []}')


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tool config .*none\.json cannot be read"):
        ToolConfig.from_file(tmp_path / "none.json")
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"tool config .*bad\.json is not JSON"):
        ToolConfig.from_file(path)
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match=r"bad\.json: unknown key 'a'"):
        ToolConfig.from_file(path)
