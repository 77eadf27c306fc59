"""Observations behind a prompt in which the chat template told of tools, against the conversation rendered whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import TemplateTokenizer

from verl_tool.agent_loop.observation_renderer import user_renderer
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer, schema_of
from verl_tool.agent_loop.rendering.tokenizer_with_tools import TokenizerWithTools
from verl_tool.agent_loop.trajectory import Author
from verl_tool.servers.tools import load_tools

TOOLS = [tool.describe() for tool in load_tools("calculator,finish")]
ASKED = [{"role": "user", "content": "What is 6*7?"}]
TURN = "I ask."
REPEATS = (
    "mistralai-Mistral-7B-Instruct-v0.3",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
)
"""Write the schemas before the last message of the user, wherever that is."""
HEEDS = ("ai-sage-GigaChat3.1-Audio-10B-A1.8B", "nc-ai-consortium-VAETKI-20B-A2B", "inclusionAI-SingGuard-2b")
"""Write another text around an observation where they are told of tools."""
ALIKE = (
    "Qwen-Qwen2.5-7B-Instruct",
    "meta-llama-Llama-3.1-8B-Instruct",
    "zai-org-GLM-4.5-Air",
    "deepseek-ai-DeepSeek-V3.1",
)


def prompts_of(name: str, **options: Any) -> tuple[TemplateTokenizer, PromptRenderer]:
    tokenizer = TemplateTokenizer(name, ("<|im_end|>",))
    settings = EpisodeOptions(**({"enable_mtrl": True, "tool_prompt": "none"} | options))
    return tokenizer, PromptRenderer(tokenizer, settings, TOOLS)


def appended(
    tokenizer: TemplateTokenizer, prompts: PromptRenderer, output: str, listed: list[str] | None = None
) -> str:
    """What stands behind a turn of the model."""
    segments = prompts.observations(listed).next(tokenizer.encode(TURN), [output], ())
    assert [segment.text for segment in segments if segment.author is Author.TOOL] == [output]
    return tokenizer.decode([token for segment in segments for token in segment.tokens])


def whole(tokenizer: TemplateTokenizer, output: str, names: list[str]) -> str:
    """The conversation as the template renders it at once."""
    messages = [*ASKED, {"role": "assistant", "content": TURN}, {"role": "user", "content": output}]
    told = [schema_of(tool) for tool in TOOLS if tool.name in names]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=told)


@pytest.mark.parametrize("name", [*HEEDS, *ALIKE])
@settings(max_examples=10)
@given(output=st.text("ab 1\n{}", min_size=1).map(lambda text: f"x{text}x"), finish=st.booleans())
def test_what_is_appended_ends_the_conversation_rendered_whole(name: str, output: str, finish: bool) -> None:
    tokenizer, prompts = prompts_of(name)
    listed = None if finish else ["calculator"]
    text = appended(tokenizer, prompts, output, listed)
    assert whole(tokenizer, output, ["calculator", "finish"] if finish else ["calculator"]).endswith(TURN + text)


@pytest.mark.parametrize("name", HEEDS)
def test_without_the_tools_it_would_be_another_text(name: str) -> None:
    tokenizer, prompts = prompts_of(name)
    _, silent = prompts_of(name, tool_schemas="none")
    assert appended(tokenizer, prompts, "42") != appended(tokenizer, silent, "42")


@pytest.mark.parametrize("name", ALIKE)
def test_most_templates_write_the_same_and_are_not_told_again(name: str) -> None:
    _, prompts = prompts_of(name)
    assert prompts.observations() is prompts.observations(["calculator"])


@pytest.mark.parametrize("name", REPEATS)
def test_schemas_are_not_written_anew_with_each_observation(name: str) -> None:
    """Rendered whole, they stand before the last message of the user alone. What was fed stays as it was: the prompt
    has them, and the observation is as without tools."""
    tokenizer, prompts = prompts_of(name)
    text = appended(tokenizer, prompts, "42")
    assert "[AVAILABLE_TOOLS]" in prompts.text(ASKED)
    assert "[AVAILABLE_TOOLS]" not in text
    at_once = whole(tokenizer, "42", ["calculator", "finish"])
    assert at_once.count("[AVAILABLE_TOOLS]") == 1
    assert at_once.index("[AVAILABLE_TOOLS]") > at_once.index(TURN)
    assert at_once.endswith(text.rpartition("[INST]")[2])


def test_a_template_that_takes_a_tool_s_message_only_where_it_knows_tools() -> None:
    tokenizer, prompts = prompts_of("tiiuae-Falcon-H1R-7B", mtrl_role="tool", formats=["hermes"])
    assert "<tool_response>\n42\n</tool_response>" in appended(tokenizer, prompts, "42")


def test_a_conversation_s_own_tools_come_first() -> None:
    tokenizer = TemplateTokenizer(ALIKE[0], ("<|im_end|>",))
    calculator, finish = map(schema_of, TOOLS)
    telling = TokenizerWithTools(tokenizer, [calculator])
    told = telling.apply_chat_template(ASKED, add_generation_prompt=True)
    assert told == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tools=[calculator])
    other = telling.apply_chat_template(ASKED, add_generation_prompt=True, tools=[finish])
    assert other == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tools=[finish])


@pytest.mark.parametrize("name", [*HEEDS, *ALIKE])
def test_a_user_s_message_among_messages_of_tools_ends_the_conversation_too(name: str) -> None:
    tokenizer, prompts = prompts_of(name, mtrl_role="tool")
    segments = user_renderer(prompts.observations()).next(tokenizer.encode(TURN), ["Go on."], ())
    text = tokenizer.decode([token for segment in segments for token in segment.tokens])
    assert whole(tokenizer, "Go on.", ["calculator", "finish"]).endswith(TURN + text)
