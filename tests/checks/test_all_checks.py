"""All checks together, on the chat templates of real models and on what fails them."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_setups import NATIVE, PLAIN, chat, family, row, setup_of
from template_models import GLM_TOKENS

from verl_tool.checks import FIRST, examine, examine_rows
from verl_tool.checks.finding import Severity
from verl_tool.checks.setup import MADE_UP_TOOL, Row

FAILS = """
class Fails:
    name, stop, observation = "fails", ("</fails>",), None

    def markers(self):
        return ("<fails>",)

    def find_calls(self, text):
        return []

    def render(self, output, call=None):
        return output

    def usage(self, tools):
        return {}["usage"]


FORMAT = Fails()
"""


@pytest.mark.parametrize("name", NATIVE)
def test_a_model_with_its_own_format_and_role_has_neither_errors_nor_warnings(name: str) -> None:
    fmt, ends = NATIVE[name]
    rows = [row(), row(use_tool=False), row(max_turns=2)]
    more = {"glm": GLM_TOKENS, "llama3": ("<|python_tag|>",)}.get(fmt, ())  # that not every template writes
    tokenizer = family(name, *ends, *more)
    tokenizer.eos_token_ids = frozenset(tokenizer.encode(end)[0] for end in ends)
    lengths = {"max_prompt_length": 10_000, "max_response_length": 2000}
    setup = setup_of(tokenizer, [MADE_UP_TOOL], rows, formats=[fmt], mtrl_role="tool", **lengths)
    assert [str(each) for each in examine(setup) if each.severity is not Severity.NOTE] == []
    assert [str(each) for each in examine_rows(setup.rows) if each.severity is not Severity.NOTE] == []


def test_a_check_that_fails_is_told_and_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    findings = examine(setup_of(PLAIN, formats=[str(path)], tool_schemas="none"))
    failed = [each for each in findings if "the check fails: KeyError" in each.what]
    assert failed
    assert all(each.severity is Severity.WARNING for each in failed)


def test_rows_of_any_kind_raise_nothing() -> None:
    odd = [{"prompt": 5}, {"prompt": [{"role": "user"}], "reward_model": 3, "extra_info": "x"}, {}]
    rows = [Row(f"row {i}", each) for i, each in enumerate(odd)]
    assert any(each.severity is Severity.ERROR for each in examine_rows(rows[1:]))
    assert examine_rows(rows)


def test_where_the_template_cannot_serve_nothing_else_is_told() -> None:
    findings = examine(setup_of(chat("{{ raise_exception('closed') }}")))
    assert {each.check for each in findings} == {check.__name__ for check in FIRST}
