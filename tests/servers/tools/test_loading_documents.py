"""The tools that README.md and the documentation show are loaded and called."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from toy_tools import picture

from tests.servers.tools.actions import text
from verl_tool.protocol import StepRequest
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import InvalidCall, Tool, load_tools

ROOT = Path(__file__).parents[3]


def tools_of(page: str, part: str, folder: Path) -> list[Tool]:
    """The tools of the page's one Python block that holds `part`."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if part in block]
    file = folder / "shown.py"
    file.write_text(block)
    return load_tools(str(file))


async def test_the_tool_in_the_readme(tmp_path: Path) -> None:
    [weather] = tools_of("README.md", "@tool", tmp_path)
    answer = "Rome: 20 °F and sun for 2 days"
    call = '{"name": "weather", "arguments": {"city": "Rome", "days": "2", "unit": "F"}}'
    assert await text(weather, f"<tool_call>{call}</tool_call>") == answer
    assert await text(weather, "<weather>Rome</weather>") == "Rome: 20 °C and sun for 3 days"
    told = "wrong arguments for weather(city, days=3, unit='C'): days: Input should be a valid integer, "
    assert told in (ROOT / "README.md").read_text()
    with pytest.raises(InvalidCall, match=re.escape(told)):
        await text(weather, '<weather>{"city": "Rome", "days": "two"}</weather>')
    assert weather.describe().parameters["properties"]["unit"]["enum"] == ["C", "F"]


async def test_the_typed_tool_in_the_documentation(tmp_path: Path) -> None:
    [weather] = tools_of("assets/docs/tools.md", "FORECASTS", tmp_path)
    assert await text(weather, "<weather>Oslo</weather>") == "snow, snow, snow"
    assert await text(weather, "<weather>Paris</weather>") == (
        "Error: there is no forecast for Paris; known: Rome, Oslo"
    )
    with pytest.raises(InvalidCall, match="days: Input should be less than or equal to 10, not 11"):
        await text(weather, '<weather>{"city": "Rome", "days": 11}</weather>')


async def test_the_tool_with_images_in_the_documentation(tmp_path: Path) -> None:
    [look] = tools_of("assets/docs/tools.md", "encode_image", tmp_path)
    picture(1, (20, 10)).decode().save(tmp_path / "map.png")
    box = {"left": 5, "top": 0, "right": 12, "bottom": 4}
    call = json.dumps({"name": "look", "arguments": box})
    [result] = await ToolSet([look]).step([StepRequest("t", f"<tool_call>{call}</tool_call>")], timeout_seconds=20)
    assert "The part that you asked for:<image>" in result.observation
    assert [(image.width, image.height) for image in result.image] == [(7, 4)]
    assert await text(look, call.replace("12", "21")) == "Error: the map is 20 x 10 pixels"


async def test_the_tools_with_state_in_the_documentation(tmp_path: Path) -> None:
    tools = ToolSet(tools_of("assets/docs/tools.md", "TrajectoryTools", tmp_path))
    actions = ['<add_item>{"item": "bread", "count": 20}</add_item>', "<show_cart/>"]
    extra = {"items": ["oil"]}
    for number, (action, answer) in enumerate(zip(actions, ["10 items", '["oil", "bread",'], strict=True)):
        [result] = await tools.step([StepRequest("t", action, number, extra=extra)], timeout_seconds=20)
        assert answer in result.observation
    await tools.close()


async def test_the_tool_of_the_tutorial(tmp_path: Path) -> None:
    [price] = tools_of("assets/docs/tutorial.md", "@tool", tmp_path)
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "K42", "count": 3}}\n</tool_call>'
    assert await text(price, call) == "108"
    with pytest.raises(InvalidCall, match="count: Input should be greater than or equal to 1, not 0"):
        await text(price, call.replace("3", "0"))


async def test_the_class_in_the_documentation(tmp_path: Path) -> None:
    [reverse] = tools_of("assets/docs/tools.md", "class Reverse", tmp_path)
    assert await text(reverse, "<reverse>abc</reverse>") == "cba"
