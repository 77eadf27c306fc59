"""What a chat template makes of prompts, tools, thoughts and observations."""

from __future__ import annotations

import pytest
from doctor_setups import HERMES_LIKE, PLAIN, THINKS, TOOLS, chat, family, only, row, setup_of, told
from real_tokenizers import HERMES_TEMPLATE, PLAIN_TEMPLATE, byte_level

from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.checks.finding import Severity
from verl_tool.checks.template import (
    check_thoughts_preserved,
    check_tools_described,
    observations_render,
    prompts_render,
)

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN_TEMPLATE
DEAF = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
NAMES_ONLY = HERMES_TEMPLATE.replace("{{ tool | tojson }}", "{{ tool.function.name }}")
USER_ONLY = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool') }}{% endif %}{% endfor %}"


def test_prompts_that_render_are_no_finding() -> None:
    assert not told(prompts_render, setup_of(rows=[row(), row("x")]))
    assert not told(prompts_render, setup_of())


def test_a_template_that_fails_on_the_roles_of_a_row_names_the_row() -> None:
    system = row(prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}])
    setup = setup_of(chat(NO_SYSTEM), rows=[row(), row(), system], tool_schemas="none")
    only(told(prompts_render, setup), ERROR, "row 2: the chat template fails", "no system", "custom_chat_template")


def test_a_template_that_drops_the_system_message_and_with_it_the_tools_is_an_error() -> None:
    only(told(prompts_render, setup_of(chat(DEAF))), ERROR, "leaves out the system message", "tool_schemas=none")


def test_no_template_at_all_is_an_error() -> None:
    without = HFTokenizer(byte_level(["<|end|>"], eos_token="<|end|>"))
    only(told(prompts_render, setup_of(without, tool_schemas="none")), ERROR, "custom_chat_template")


def test_an_observation_that_the_template_refuses_is_an_error() -> None:
    setup = setup_of(chat(USER_ONLY + PLAIN_TEMPLATE), mtrl_role="tool")
    only(told(observations_render, setup), ERROR, "refuses a turn of role 'tool'", "mtrl_sep")
    assert not told(observations_render, setup_of(PLAIN))


@pytest.mark.parametrize("tokenizer", [PLAIN, HERMES_LIKE])
def test_tools_that_are_told_by_the_template_or_by_the_usage_text_are_no_finding(tokenizer: object) -> None:
    assert not told(check_tools_described, setup_of(tokenizer))  # type: ignore[arg-type]


def test_a_template_that_drops_the_tools_is_an_error_where_nothing_else_tells_of_them() -> None:
    setup = setup_of(PLAIN, tool_prompt="none")
    only(
        told(check_tools_described, setup),
        ERROR,
        "drops the tools: calculator, python_code, finish",
        "tool_prompt=auto",
    )
    assert not told(check_tools_described, setup_of(PLAIN, tool_prompt="none", tool_schemas="none"))


def test_a_template_that_names_tools_without_their_arguments_is_a_warning() -> None:
    setup = setup_of(chat(NAMES_ONLY), TOOLS[:1])
    only(told(check_tools_described, setup), WARNING, "calculator (description, expression)", "tool_prompt=system")


def test_a_template_whose_calls_the_loop_would_not_find_is_a_warning_with_the_format_to_name() -> None:
    llama = family("meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>", "<|eom_id|>")
    setup = setup_of(llama, formats=["hermes"], mtrl_role="tool")
    only(told(check_tools_described, setup), WARNING, "usage text of 'hermes'", "set formats=[llama3]")
    assert not told(check_tools_described, setup_of(llama, formats=["llama3"], mtrl_role="tool"))


def test_that_a_template_takes_no_tools_is_noted() -> None:
    [finding] = check_tools_described(setup_of(PLAIN))
    assert finding.severity is NOTE
    assert "takes no tools" in finding.what


def test_a_template_that_drops_thoughts_is_a_warning_in_chat_mode_only() -> None:
    only(
        told(check_thoughts_preserved, setup_of(chat(THINKS))),
        WARNING,
        "drops the model's thoughts",
        "role 'user'",
        "serve",
    )
    inline = setup_of(chat(THINKS), enable_mtrl=False, action_stop_tokens=["```output"])
    assert [each.severity for each in check_thoughts_preserved(inline)] == [NOTE]
    assert not list(check_thoughts_preserved(setup_of(PLAIN)))


def test_qwen3_drops_thoughts_before_a_user_s_message_and_keeps_them_before_a_tool_s() -> None:
    qwen = family("Qwen-Qwen3-0.6B", "<|im_end|>")
    only(told(check_thoughts_preserved, setup_of(qwen)), WARNING, "mtrl_role=tool")
    [finding] = check_thoughts_preserved(setup_of(qwen, mtrl_role="tool"))
    assert finding.severity is NOTE
