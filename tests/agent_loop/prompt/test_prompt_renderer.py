"""What prompts tell of tools, with templates in the shapes of real ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import HERMES_TEMPLATE, PLAIN_TEMPLATE, chat_tokenizer
from toy_images import image_tokenizer
from toy_model import ToyTokenizer

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer, schema_of
from verl_tool.agent_loop.tokenizer import HFTokenizer, prompt_text
from verl_tool.errors import ConfigError
from verl_tool.formats import FENCED, HERMES, format_by_name
from verl_tool.protocol import ToolDescription
from verl_tool.servers.tools import load_tools

TOOLS = [tool.describe() for tool in load_tools("calculator,python_code,finish")]
NAMES = ["calculator", "python_code", "finish"]
ASKED = [{"role": "user", "content": "What is 13.1-3?"}]
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN_TEMPLATE
"""As Gemma's."""
_DEAF = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
"""Drops the system message without a word."""


def tokenizer_of(template: str) -> HFTokenizer:
    return HFTokenizer(chat_tokenizer(template))


PLAIN, TAKES_TOOLS = tokenizer_of(PLAIN_TEMPLATE), tokenizer_of(HERMES_TEMPLATE)


def renderer(tokenizer: Any, **options: Any) -> PromptRenderer:
    return PromptRenderer(tokenizer, EpisodeOptions.load({"enable_mtrl": True} | options), TOOLS)


@pytest.mark.parametrize("tokenizer", [PLAIN, TAKES_TOOLS])
@pytest.mark.parametrize(
    "options",
    [
        {"tool_schemas": "none"},
        {"enable_agent": False},
        {"enable_mtrl": False, "action_stop_tokens": ["```output"]},
        {"tool_schemas": []},
    ],
)
def test_a_prompt_that_tells_of_no_tool_is_the_conversation_alone(tokenizer: Any, options: dict[str, Any]) -> None:
    prompts = renderer(tokenizer, **options)
    assert prompts.described_tools() == ()
    assert prompts.text(ASKED) == prompt_text(tokenizer, ASKED)
    assert prompts.ids(ASKED, None, "row 0") == tokenizer.encode(prompt_text(tokenizer, ASKED))


def test_a_template_that_takes_tools_gets_the_schemas_of_all() -> None:
    assert renderer(TAKES_TOOLS).text(ASKED) == prompt_text(TAKES_TOOLS, ASKED, [schema_of(tool) for tool in TOOLS])


@pytest.mark.parametrize("options", [{}, {"enable_mtrl": False, "action_stop_tokens": ["</tool_call>"]}])
def test_a_row_narrows_them_and_none_are_told_twice(options: dict[str, Any]) -> None:
    text = renderer(TAKES_TOOLS, **options).text(ASKED, ["python_code"])
    assert text == prompt_text(TAKES_TOOLS, ASKED, [schema_of(TOOLS[1])])
    assert renderer(TAKES_TOOLS, **options).text(ASKED, []) == prompt_text(TAKES_TOOLS, ASKED)


@settings(max_examples=50)
@given(wanted=st.none() | st.lists(st.sampled_from(NAMES)), listed=st.none() | st.lists(st.sampled_from(NAMES)))
def test_told_are_the_named_ones_that_the_row_lists_in_the_servers_order(
    wanted: list[str] | None, listed: list[str] | None
) -> None:
    prompts = renderer(ToyTokenizer(), tool_schemas="auto" if wanted is None else wanted)
    expected = [name for name in NAMES if all(names is None or name in names for names in (wanted, listed))]
    assert [tool.name for tool in prompts.described_tools(listed)] == expected
    assert prompts.text(ASKED, listed) == prompts.text(ASKED, listed and [*reversed(listed), *listed])


def test_a_template_without_tools_gets_the_usage_behind_the_system_message() -> None:
    usage = HERMES.usage(TOOLS).strip()
    system = {"role": "system", "content": "Be brief."}
    assert renderer(PLAIN).text(ASKED) == prompt_text(PLAIN, [{"role": "system", "content": usage}, *ASKED])
    expected = prompt_text(PLAIN, [{"role": "system", "content": f"Be brief.\n\n{usage}"}, *ASKED])
    assert renderer(PLAIN).text([system, *ASKED]) == expected


@pytest.mark.parametrize(("stop", "name"), [("```output", "fenced"), ("</tool_call>", "hermes"), ("<call>", "trl")])
def test_the_usage_is_of_the_format_that_the_stop_strings_end(stop: str, name: str) -> None:
    prompts = renderer(PLAIN, action_stop_tokens=[stop], tool_schemas=["calculator"])
    assert format_by_name(name).usage(TOOLS[:1]).strip() in prompts.text(ASKED)


def test_the_usage_is_of_the_first_format_that_the_options_name() -> None:
    prompts = renderer(PLAIN, formats=["<calculator>", "fenced"], tool_schemas=["calculator"])
    assert format_by_name("<calculator>").usage(TOOLS[:1]).strip() in prompts.text(ASKED)


def test_a_stop_string_of_a_tools_own_tag_brings_the_tools_own_usage() -> None:
    (own,) = [TOOLS[0].model_copy(update={"usage": "Write <mine>…</mine>."})]
    options = EpisodeOptions(enable_mtrl=True, action_stop_tokens=("</mine>",))
    assert "\nWrite <mine>…</mine>.<|im_end|>" in PromptRenderer(PLAIN, options, [own]).text(ASKED)


def test_a_template_that_teaches_calls_which_do_not_stop_is_not_asked() -> None:
    text = renderer(TAKES_TOOLS, action_stop_tokens=["```output"], tool_schemas=["python_code"]).text(ASKED)
    assert FENCED.usage([TOOLS[1]]).strip() in text
    assert "<tools>" not in text


def test_the_way_of_telling_can_be_chosen() -> None:
    by_usage = [{"role": "system", "content": HERMES.usage(TOOLS).strip()}, *ASKED]
    assert renderer(TAKES_TOOLS, tool_prompt="system").text(ASKED) == prompt_text(TAKES_TOOLS, by_usage)
    schemas = [schema_of(tool) for tool in TOOLS]
    own = renderer(TAKES_TOOLS, tool_prompt="none", action_stop_tokens=["```output"]).text(ASKED)
    assert own == prompt_text(TAKES_TOOLS, ASKED, schemas)
    assert renderer(PLAIN, tool_prompt="none").text(ASKED) == prompt_text(PLAIN, ASKED)


def test_a_template_that_refuses_system_messages_tells_the_user() -> None:
    text = renderer(tokenizer_of(_NO_SYSTEM)).text([*ASKED, *ASKED])
    usage = HERMES.usage(TOOLS).strip()
    assert text == prompt_text(PLAIN, [{"role": "user", "content": f"{usage}\n\n{ASKED[0]['content']}"}, *ASKED])


def test_a_template_that_drops_the_system_message_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leaves out the system message.* tool_schemas=none"):
        renderer(tokenizer_of(_DEAF)).text(ASKED)


def test_unknown_tools_are_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="tool_schemas: the tool 'calc' is unknown; known: calculator, python_code, fin"
    ):
        renderer(PLAIN, tool_schemas=["calc"])
    with pytest.raises(ConfigError, match="row 3: the tool 'calc' is unknown; known: calculator"):
        renderer(PLAIN).ids(ASKED, ["calc"], "row 3")


@pytest.mark.parametrize("limit", ["max_prompt_length", "max_start_length"])
@pytest.mark.parametrize("tokenizer", [PLAIN, TAKES_TOOLS])
def test_a_prompt_that_its_tools_make_too_long_is_refused_by_both_lengths(tokenizer: Any, limit: str) -> None:
    whole, bare = (
        len(tokenizer.encode(text)) for text in (renderer(tokenizer).text(ASKED), prompt_text(tokenizer, ASKED))
    )
    assert len(renderer(tokenizer, **{limit: whole}).ids(ASKED, None, "row 4")) == whole
    told = f"row 4: the prompt has {whole} tokens, {whole - bare} of them about .*calculator.* and {limit}={whole - 1}"
    with pytest.raises(ConfigError, match=told):
        renderer(tokenizer, **{limit: whole - 1}).ids(ASKED, None, "row 4")
    # One that tells of none is the loop's to cut.
    assert len(renderer(tokenizer, tool_schemas="none", **{limit: 1}).ids(ASKED, None, "row 4")) == bare


def test_a_schema_is_openais() -> None:
    tool = ToolDescription(name="a", description="b", parameters={"type": "object"}, usage="u", example_actions=["x"])
    function = {"name": "a", "description": "b", "parameters": {"type": "object"}}
    assert schema_of(tool) == {"type": "function", "function": function}


@pytest.mark.parametrize("system", [None, "Be brief.", [{"type": "image"}]])
def test_usage_stands_beside_images(system: Any) -> None:
    prompts = PromptRenderer(image_tokenizer(), EpisodeOptions.load({"enable_mtrl": True}), TOOLS)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
    messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    text = prompts.text(messages)
    assert text.count("<|image_pad|>") == (2 if isinstance(system, list) else 1)
    assert text.index("python_code") < text.index("what is it?")


def test_the_tokens_of_images_count_for_the_limit() -> None:
    prompts = PromptRenderer(PLAIN, EpisodeOptions.load({"enable_mtrl": True, "max_prompt_length": 2000}), TOOLS)
    n = len(prompts.ids(ASKED, None, "row 3"))
    assert len(prompts.ids(ASKED, None, "row 3", 2000 - n)) == n
    with pytest.raises(ConfigError, match="row 3: the prompt has 2001 tokens"):
        prompts.ids(ASKED, None, "row 3", 2001 - n)
