from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from pathlib import Path

import pytest

from tests.servers.tools.actions import results, text
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import ALL_FORMATS
from verl_tool.servers.tools import CallError, Context, InvalidCall, ToolOptions, ToolResult, load_tools, tool
from verl_tool.servers.tools.typed.function_tool import function_tool

WEATHER = Path(__file__).parents[1] / "data" / "weather.py"
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": "2"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (HERMES_CALL, "Rome: sun for 2 days"),
        ('{"name": "weather", "arguments": {"city": "Rome"}}', "Rome: sun for 3 days"),
        ("<weather>Rome</weather>", "Rome: sun for 3 days"),
        ('<weather>{"city": "Rome", "days": 1}</weather>', "Rome: sun for 1 days"),
        ("```weather\nRome\n```", "Rome: sun for 3 days"),
        ("<request><weather>Rome<call>", "Rome: sun for 3 days"),
        ('<tool>{"name": "weather", "arguments": {"city": "Rome"}}</tool>', "Rome: sun for 3 days"),
    ],
)
async def test_a_function_of_a_few_lines_is_called_in_every_format(action: str, answer: str) -> None:
    [weather] = load_tools(str(WEATHER))
    assert await text(weather, action) == answer


def test_what_get_tools_tells_follows_from_the_function() -> None:
    [weather] = load_tools(str(WEATHER))
    described = weather.describe()
    assert (described.name, described.description) == ("weather", "Forecast for a city.")
    assert described.parameters["properties"]["city"] == {"type": "string", "description": "Name of the city."}
    assert json.dumps(described.parameters) in described.usage
    assert described.example_actions == ['<tool_call>\n{"name": "weather", "arguments": {"city": "…"}}\n</tool_call>']
    assert all(weather.recognise(action) for action in described.example_actions)


class LoudOptions(ToolOptions):
    times: int = 1


@tool(name="shout", aliases=("yell",), example_actions=("<shout>hey</shout>",))
async def shouted(words: str, options: LoudOptions, context: Context) -> str:
    """Shouts."""
    return words.upper() * options.times + str(context.step)


async def test_options_and_context_are_given_by_annotation() -> None:
    shout = function_tool(shouted)(times=2)
    assert (shout.name, shout.example_actions) == ("shout", ("<shout>hey</shout>",))
    assert await text(shout, "<yell>hey</yell>") == "HEYHEYNone"
    with pytest.raises(ConfigError, match=r"tool shout has no option 'tims'; known: .*times"):
        function_tool(shouted)(tims=2)


async def test_a_decorated_function_is_still_a_function() -> None:
    assert await shouted("a", LoudOptions(), Context("t", 0, None)) == "A0"


def given_back(value: object) -> Callable[[], object]:
    @tool
    async def giver() -> object:
        """Gives it."""
        if isinstance(value, BaseException):
            raise value
        return value

    return giver


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("text", "text"),
        (None, ""),
        (3, "3"),
        (True, "true"),
        ([1, "ä"], '[1, "ä"]'),
        ({"a": {1.5}}, '{"a": [1.5]}'),
        (Decimal("1.10"), "1.10"),
        (float("inf"), "Infinity"),
        (LoudOptions(times=2).model_copy(), None),
        (ToolResult("whole", done=True), "whole"),
    ],
)
async def test_a_text_is_the_answer_and_all_else_is_json(value: object, told: str | None) -> None:
    answer = await text(function_tool(given_back(value))(), "<giver/>")
    assert json.loads(answer)["times"] == 2 if told is None else answer == told


@pytest.mark.parametrize("value", [object(), b"\xff", {1: object()}])
async def test_what_json_cannot_hold_is_a_bug_of_the_tool(value: object) -> None:
    with pytest.raises(TypeError, match=r"giver returned a .*; return a text or a ToolResult"):
        await text(function_tool(given_back(value))(), "<giver/>")


async def test_what_a_function_raises() -> None:
    [failed] = await results(function_tool(given_back(CallError("no such city")))(), "<giver/>")
    assert (failed.text, failed.error, failed.valid) == ("Error: no such city", True, True)
    with pytest.raises(InvalidCall, match="what"):
        await text(function_tool(given_back(InvalidCall("what")))(), "<giver/>")
    with pytest.raises(KeyError):
        await text(function_tool(given_back(KeyError("k")))(), "<giver/>")
    with pytest.raises(RuntimeError, match=r"called exit\(3\); raise CallError"):
        await text(function_tool(given_back(SystemExit(3)))(), "<giver/>")


def retried(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def again(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return again


@retried
@tool
async def wrapped(city: str) -> str:
    """Gives it."""
    return city


async def test_a_decorator_that_keeps_the_signature_may_stand_around_it() -> None:
    assert await text(function_tool(wrapped)(), "<wrapped>Rome</wrapped>") == "Rome"


@tool
def blocking(words: str) -> str:
    """Blocks."""
    if words == "exit":
        raise SystemExit(1)
    if words == "stop":
        raise StopIteration
    return threading.current_thread().name


async def test_a_function_that_blocks_runs_in_a_thread() -> None:
    blocks = function_tool(blocking)()
    assert await text(blocks, "<blocking>a</blocking>") == "tool-blocking"
    for words in ("exit", "stop"):
        with pytest.raises(RuntimeError):
            await text(blocks, f"<blocking>{words}</blocking>")


@pytest.mark.parametrize("value", [int, 3, "weather", staticmethod(len), ToolOptions])
def test_only_functions_are_decorated(value: object) -> None:
    with pytest.raises(ConfigError, match="it makes a tool of a function or a method, and takes name="):
        tool(value)


def test_a_name_must_be_one_that_a_call_can_bear() -> None:
    with pytest.raises(ConfigError, match="'two words' cannot name a tool"):
        tool(name="two words")(retried)


def test_the_formats_of_a_typed_tool_are_those_of_any_tool() -> None:
    shout = function_tool(shouted)()
    assert set(ALL_FORMATS) < set(shout.formats)


async def test_calls_in_threads_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)

    @tool
    def meeting() -> str:
        """Waits for the other."""
        both.wait()
        return "met"

    meets = function_tool(meeting)()
    assert await asyncio.gather(text(meets, "<meeting/>"), text(meets, "<meeting/>")) == ["met", "met"]


async def test_a_thread_serves_one_call_after_the_other_and_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    said: contextvars.ContextVar[str] = contextvars.ContextVar("said", default="nothing")

    @tool
    def remembering(words: str) -> str:
        """Remembers."""
        threads.add(threading.current_thread())
        seen.append(said.get())
        said.set(words)
        return words

    threads: set[threading.Thread] = set()
    seen: list[str] = []
    remembers = function_tool(remembering)()
    for words, idle_seconds in (("a", 60), ("b", 60), ("c", 0.01)):
        monkeypatch.setattr("verl_tool.servers.tools.typed.threads.IDLE_SECONDS", idle_seconds)
        await text(remembers, f"<remembering>{words}</remembering>")
    assert seen == ["nothing"] * 3, "each call has the context of its own caller"
    (thread,) = threads
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()
    await text(remembers, "<remembering>d</remembering>")
    assert len(threads) == 2


async def test_threads_that_never_come_back_are_a_fault_of_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_tool.servers.tools.typed.threads.MAX_THREADS", 2)
    go_on = threading.Event()

    @tool
    def hanging() -> str:
        """Hangs."""
        go_on.wait(60)
        return "back"

    hangs = function_tool(hanging)()
    for _ in range(2):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(text(hangs, "<hanging/>"), 0.05)
    with pytest.raises(ToolFault, match="all 2 threads of tool hanging run calls that outlasted") as caught:
        await text(hangs, "<hanging/>")
    assert caught.value.retryable
    with pytest.raises(ToolFault, match="all 2 threads"):
        await hangs.check()
    go_on.set()
    while True:
        try:
            await hangs.check()
            break
        except ToolFault:
            await asyncio.sleep(0.01)
    assert await text(hangs, "<hanging/>") == "back"
