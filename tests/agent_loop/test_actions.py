"""A turn ends with the token that completes a stop string, however the engine came to its tokens. The formats of the
loop find what a server with the same tools takes for a call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_tokenizers import shape
from toy_model import ToyTokenizer

from verl_tool.agent_loop.action_tokens import action_mask
from verl_tool.agent_loop.actions import LoopFormats, ParsedTurn, calls_of, length_to_stop
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer, Tokenizer
from verl_tool.agent_loop.trajectory import ParsedCall, Trajectory
from verl_tool.formats import ALL_FORMATS, HARMONY, HERMES, Call, Format, HermesFormat
from verl_tool.formats.tags import OwnTagFormat
from verl_tool.protocol import StepResult
from verl_tool.servers.execution.calls import CallFinder
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.base import Context, Tool, ToolResult
from verl_tool.trajectories.turns import turns_of

STOPS = ("</python>", "\n日本")
MERGING = ToyTokenizer(words=["n>\n", "</", "py", "on>", ">x"])
TEXTS = st.lists(
    st.sampled_from(["</pyt", "hon>", "</python>", "\n日", "本", "x", "1+1", "é", "😀", "\n"]), max_size=12
)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return MERGING if name == "merging" else HFTokenizer(shape(name).tokenizer)


def engine_length(tokens: list[int], name: str, stops: tuple[str, ...] = STOPS) -> int:
    """Where an engine ends that looks for stop strings behind every token."""
    for n in range(1, len(tokens) + 1):
        if any(stop in tokenizer(name).decode(tokens[:n]) for stop in stops):
            return n
    return len(tokens)


def asks_for_tools(text: str, formats: Sequence[Format]) -> bool:
    """Whether a turn that no stop string ends is an action."""
    turn = ParsedTurn.parse(text, text, (), formats)
    assert turn.action.text == text
    return turn.calls_tools


async def run(tokens: list[int], name: str, reason: str | None = None, **options: object) -> Trajectory:
    turns = iter([Generation(tokens, [-0.5 - i for i in range(len(tokens))], reason), Generation([5], [-9.0], "stop")])

    class Model:
        async def generate(self, prompt_ids: list[int], params: dict[str, object], request_id: str) -> Generation:
            return next(turns)

    class Server:
        async def call(self, *args: object, **kwargs: object) -> StepResult:
            return StepResult("t", "2")

    settings = EpisodeOptions(action_stop_tokens=STOPS, **options)  # type: ignore[arg-type]
    return await Episode(Model(), Server(), tokenizer(name), settings).run([65])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["merging", "qwen", "gemma", "mistral_v1"])
@settings(max_examples=25)
@given(pieces=TEXTS)
def test_the_turn_is_cut_where_an_engine_would_have_ended_it(name: str, pieces: list[str]) -> None:
    tokens = tokenizer(name).encode("".join(pieces))
    found = length_to_stop(tokens, STOPS, tokenizer(name))
    assert (len(tokens) if found is None else found) == engine_length(tokens, name)


@pytest.mark.parametrize("name", ["merging", "qwen", "gemma"])
@pytest.mark.parametrize("reason", [None, "stop", "length", "aborted"])
async def test_an_interrupted_turn_is_recorded_as_an_uninterrupted_one(name: str, reason: str | None) -> None:
    whole = tokenizer(name).encode("hm <python>1+1</python>\n```output\n3\n```\nSo it is 3.")
    end = engine_length(whole, name)
    uninterrupted = await run(whole[:end], name, "stop")
    for cut in range(1, len(whole)):
        # The first part is ended by the interruption, or by its own stop string; the second sees itself only.
        first = whole[: min(cut, engine_length(whole[:cut], name))]
        second = [] if len(first) < cut else whole[cut : cut + engine_length(whole[cut:], name)]
        resumed = await run([*first, *second] if len(first) == cut else first, name, reason)
        if len(resumed.response[0].tokens) < end:
            continue  # a first part that its own stop string did not end, and no second one
        assert resumed.response == uninterrupted.response
        assert resumed.response_mask == uninterrupted.response_mask
        assert resumed.response_log_probs == uninterrupted.response_log_probs
        assert resumed.stop is uninterrupted.stop


async def test_a_caller_s_own_stop_string_cuts_too() -> None:
    tokens = MERGING.encode("a#b</python>")
    model = [Generation(tokens, None, "stop")]

    class Model:
        async def generate(self, prompt_ids: list[int], params: dict[str, object], request_id: str) -> Generation:
            return model.pop()

    episode = Episode(Model(), None, MERGING, EpisodeOptions(enable_agent=False))  # type: ignore[arg-type]
    trajectory = await episode.run([65], sampling_params={"stop": "#"})
    assert trajectory.response_text == "a#"


def test_stop_strings_among_the_first_tokens_count_for_nothing() -> None:
    tokens = [*b"a#b#c"]
    assert length_to_stop(tokens, ["#"], MERGING) == 2
    assert length_to_stop(tokens, ["#"], MERGING, min_tokens=2) == 4
    assert length_to_stop(tokens, ["b#"], MERGING, min_tokens=3) == 4
    assert length_to_stop(tokens, ["c#"], MERGING) is None
    assert length_to_stop(tokens, [], MERGING) is None


def test_long_turns_are_not_decoded_once_a_token() -> None:
    decoded: list[int] = []

    class Counting(ToyTokenizer):
        def decode(self, token_ids: object) -> str:
            decoded.append(1)
            return super().decode(token_ids)  # type: ignore[arg-type]

    assert length_to_stop([*(b"x" * 3000), *b"</python>", *(b"y" * 3000)], STOPS, Counting()) == 3009
    assert len(decoded) < 40


# The formats of the loop


class Thinker(Tool):
    """Has the name of a thought's tag."""

    name = "think"
    aliases = ("ponder",)
    description = "Thinks."

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult(call.input)


COUNTER = str(Path(__file__).parents[1] / "servers/data/counter.py")
TOOLS = (*load_tools("calculator,finish," + COUNTER), Thinker())
NAMES = tuple(tool.name for tool in TOOLS)
SERVER = CallFinder(TOOLS)
LOOP = LoopFormats(None, [tool.describe() for tool in TOOLS])
PIECES = (
    *("<calculator>", "</calculator>", "<calc>", "</calc>", "<CALCULATOR>", "</CALCULATOR>", "<finish/>", "<counter>"),
    *(
        "</counter>",
        "<ponder>",
        "</ponder>",
        "<think>",
        "</think>",
        "<result>",
        "</result>",
        "```",
        "\n",
        "1+1",
        " so ",
    ),
    *('<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>', "<tool>1</tool>"),
)
quickly = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
lists = st.none() | st.sets(st.sampled_from(NAMES)).map(sorted)


@quickly
@given(texts, lists)
def test_the_loop_finds_a_call_wherever_the_server_runs_one(text: str, listed: list[str] | None) -> None:
    only = None if listed is None else [tool for tool in TOOLS if tool.name in listed]
    runs, _ = SERVER.find(text, only)
    if runs:
        assert asks_for_tools(text, LOOP.of(listed))


@quickly
@given(texts, lists)
def test_a_tag_of_a_tool_is_a_call_only_if_the_server_runs_something(text: str, listed: list[str] | None) -> None:
    own = [fmt for fmt in LOOP.of(listed) if isinstance(fmt, OwnTagFormat)]
    if asks_for_tools(text, own):
        only = None if listed is None else [tool for tool in TOOLS if tool.name in listed]
        assert SERVER.find(text, only)[0]


@quickly
@given(lists)
def test_a_row_that_lists_tools_has_the_formats_of_a_server_with_those_alone(listed: list[str] | None) -> None:
    there = [tool.describe() for tool in TOOLS if listed is None or tool.name in listed]
    assert LOOP.of(listed) == LoopFormats(None, there).all


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("<calculator>1+1</calculator>", True),
        ("<CALCULATOR>1+1</CALCULATOR>", False),
        ("<think>I could write <calculator>1+1</calculator>.</think>\n2", False),
        ("I could write <calculator>1+1</calculator>.</think>\n2", False),
        ("<think>I add</think><calculator>1+1</calculator>", True),
        ("<think>so <calculator>1+1</calculator>", True),
        ("<result>\n<calculator>1+1</calculator>\n</result>", False),
        ("<counter></counter>", False),
        ("<reverse>abc</reverse>", False),
    ],
)
def test_a_turn_of_a_row_that_lists_the_calculator(text: str, called: bool) -> None:
    assert asks_for_tools(text, LOOP.of(["calculator"])) is called


def test_formats_that_are_named_are_those_of_every_row() -> None:
    named = LoopFormats(("hermes",), [tool.describe() for tool in TOOLS])
    assert named.all == named.of(["calculator"]) == (HERMES,)
    unknown = LoopFormats(None)
    assert unknown.all == unknown.of(["calculator"]) == ALL_FORMATS


CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "who", "top": 3}}\n</tool_call>'


class CountingFormat(HermesFormat):
    """Tells how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def find_calls(self, text: str) -> list[Call]:
        self.texts.append(text)
        return super().find_calls(text)


async def run_turns(turns: Sequence[str], formats: Sequence[Format], **options: object) -> Trajectory:
    written = iter(turns)

    class Model:
        async def generate(self, prompt_ids: list[int], params: dict[str, object], request_id: str) -> Generation:
            return Generation(MERGING.encode(next(written)), None, "stop")

    class Server:
        async def call(self, *args: object, **kwargs: object) -> StepResult:
            return StepResult("t", "nothing")

    settings = EpisodeOptions(enable_mtrl=True, mtrl_sep="{obs}", **options)  # type: ignore[arg-type]
    return await Episode(Model(), Server(), MERGING, settings, formats=formats).run([65])  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [(), ("</tool_call>",)])
async def test_calls_are_found_once_a_turn_and_all_later_readers_have_them(stops: tuple[str, ...]) -> None:
    fmt = CountingFormat()
    turns = [f"I ask {CALLED}", f"again {CALLED}", "nobody"]
    trajectory = await run_turns(turns, [fmt], action_stop_tokens=stops)
    [first, second] = trajectory.calls
    record = Trajectory.from_json(trajectory.to_json())
    assert record == trajectory
    mask = action_mask(record, MERGING, [fmt])
    assert MERGING.decode([t for t, is_call in zip(record.response_ids, mask, strict=True) if is_call]) == 2 * CALLED
    assert [turn.calls for turn in turns_of(record)] == [first.calls, second.calls, ()]
    assert first.calls == (ParsedCall("search", '{"query":"who","top":3}', 6, 6 + len(CALLED)),)
    assert calls_of(replace(first, calls=None)) == first.calls
    assert fmt.texts == turns


async def test_a_name_or_argument_that_utf8_cannot_hold_leaves_a_record_that_can_be_written() -> None:
    turn = '<tool_call>\n{"name": "a\\ud800", "arguments": {"x": "\\udfff", "n": NaN}}\n</tool_call>'
    trajectory = await run_turns([turn, "so"], [HERMES])
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert trajectory.calls[0].names == ("a?",)
    assert trajectory.calls[0].calls == (ParsedCall("a?", '{"x":"\ufffd","n":null}', 0, len(turn)),)


def test_arguments_that_are_nested_too_deeply_are_the_input() -> None:
    nested: dict[str, object] = {}
    for _ in range(20_000):
        nested = {"a": nested}
    assert Call("x", "text", 0, 1, HERMES, nested).arguments_json() == '{"input":"text"}'


def test_a_token_that_ends_the_turn_closes_a_call_that_it_completes() -> None:
    text = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    turn = ParsedTurn.parse(text, f"{text}<|call|>", (), [HARMONY])
    assert turn.call_spans == ((0, len(turn.raw_text)),)
    assert ParsedTurn.parse(CALLED, f"{CALLED}<|im_end|>", (), [HERMES]).call_spans == ((0, len(CALLED)),)
