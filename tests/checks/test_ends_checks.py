"""Where turns end, and which calls the loop finds."""

from __future__ import annotations

import pytest
from doctor_setups import HERMES_LIKE, PLAIN, TOOLS, chat, family, only, setup_of, told
from real_tokenizers import PLAIN_TEMPLATE, byte_level

from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.checks.ends import calls_end, tools_are_called, turns_end
from verl_tool.checks.finding import Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
INLINE = {"enable_mtrl": False}


@pytest.mark.parametrize(
    ("stops", "formats"),
    [
        (["```output"], ["fenced"]),
        (["</tool_call>"], ["hermes"]),
        (["<call>", "<submit>"], None),
        (["</calculator>"], ["<calculator>"]),
        (["```output"], None),
    ],
)
def test_calls_that_a_stop_string_ends_are_no_finding(stops: list[str], formats: list[str] | None) -> None:
    assert not told(calls_end, setup_of(**INLINE, action_stop_tokens=stops, formats=formats))


def test_formats_that_no_stop_string_ends_are_an_error() -> None:
    setup = setup_of(**INLINE, action_stop_tokens=["```output"], formats=["hermes", "<calculator>"])
    only(told(calls_end, setup), ERROR, "hermes, name_tags", "'```output'", "add '</calculator>', '</tool_call>'")
    endless = setup_of(action_stop_tokens=["</tool_call>"], formats=["llama3"])
    only(told(calls_end, endless), ERROR, "leave action_stop_tokens out", "enable_mtrl=true")


def test_one_format_among_others_that_no_stop_string_ends_is_a_warning() -> None:
    setup = setup_of(action_stop_tokens=["</tool_call>"], formats=["hermes", "fenced"])
    only(told(calls_end, setup), WARNING, "the format fenced", "taken for answers", "add '```output'")


def test_a_stop_string_that_ends_no_call_known_is_a_warning() -> None:
    only(told(calls_end, setup_of(**INLINE, action_stop_tokens=["</run>"])), WARNING, "['</run>']")


def test_without_stop_strings_or_tools_nothing_is_looked_for() -> None:
    assert not list(calls_end(setup_of()))
    assert not list(calls_end(setup_of(enable_agent=False, action_stop_tokens=["</run>"])))


def test_a_tool_that_cannot_be_called_in_the_formats_is_an_error() -> None:
    only_tags = TOOLS[0].model_copy(update={"formats": ["<calculator>"]})
    words = ("'calculator' is called by <calculator> only", "with formats=['hermes']", "set formats=[<calculator>]")
    only(told(tools_are_called, setup_of(tools=[only_tags], formats=["hermes"])), ERROR, *words)
    only(told(tools_are_called, setup_of(tools=[only_tags, TOOLS[1]], formats=["hermes"])), WARNING, *words)
    assert not told(tools_are_called, setup_of(formats=["hermes"]))


def test_a_format_of_the_server_that_the_loop_does_not_know_is_told_in_chat_mode_without_formats() -> None:
    only_tags = TOOLS[0].model_copy(update={"formats": ["<calculator>"]})
    assert not told(tools_are_called, setup_of(tools=[only_tags]))
    own = TOOLS[0].model_copy(update={"formats": ["arrows"]})
    words = (
        "called by arrows only",
        "chat mode without formats",
        "set formats=[path of the file that defines 'arrows'",
    )
    only(told(tools_are_called, setup_of(tools=[own])), ERROR, *words)
    assert not told(tools_are_called, setup_of(tools=[own], **INLINE, action_stop_tokens=["<-"]))


def base_model() -> HFTokenizer:
    """Ends at its end-of-text token, and has the template of a chat model."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return HFTokenizer(byte_level(special, eos_token="<|endoftext|>", chat_template=PLAIN_TEMPLATE))


def test_a_closing_token_that_generation_does_not_know_is_a_warning_inline() -> None:
    base = base_model()
    stops = {"action_stop_tokens": ["```output"]}
    closing = base.encode("<|im_end|>")
    only(told(turns_end, setup_of(base, **INLINE, **stops)), WARNING, "'<|im_end|>'", f"ids={closing}")
    assert not told(turns_end, setup_of(base, **INLINE, **stops, additional_eos_token_ids=closing))
    assert not told(turns_end, setup_of(base)), "in chat mode the loop adds it"


def test_a_token_behind_a_call_that_generation_does_not_know_is_a_warning() -> None:
    options = {"formats": ["glm"], "mtrl_role": "tool"}
    unknown = family("zai-org-GLM-4.5-Air", "<|endoftext|>")
    only(told(turns_end, setup_of(unknown, **options)), WARNING, "'<|observation|>'", "generation_config.json")
    known = family("zai-org-GLM-4.5-Air", "<|user|>", "<|observation|>", "<|endoftext|>")
    assert not told(turns_end, setup_of(known, **options))


def test_no_end_token_at_all_is_an_error() -> None:
    special = ["<|im_start|>", "<|im_end|>"]
    endless = HFTokenizer(byte_level(special, chat_template=PLAIN_TEMPLATE))
    setup = setup_of(endless, **INLINE, action_stop_tokens=["```output"])
    only(told(turns_end, setup), ERROR, "name an end token", "additional_eos_token_ids")


def test_known_ends_are_no_finding() -> None:
    for tokenizer in (PLAIN, HERMES_LIKE, chat(PLAIN_TEMPLATE)):
        assert not told(turns_end, setup_of(tokenizer))
