"""Prompts, calls and observations against the limits of length."""

from __future__ import annotations

import pytest
from doctor_setups import HERMES_LIKE, PLAIN, TOOLS, only, row, setup_of, told

from verl_tool.checks.finding import Severity
from verl_tool.checks.lengths import prompts_fit, turns_fit

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
LONG = row("word " * 100)
UNTOLD = {"enable_mtrl": False, "action_stop_tokens": ["```output"]}


def test_a_prompt_that_its_tools_make_too_long_is_an_error_that_names_both() -> None:
    setup = setup_of(HERMES_LIKE, rows=[row()], max_prompt_length=100)
    only(
        told(prompts_fit, setup), ERROR, "row 0: the prompt has", "about the tools calculator", "max_prompt_length=100"
    )
    assert not told(prompts_fit, setup_of(HERMES_LIKE, rows=[row()], max_prompt_length=10_000))


def test_a_prompt_that_is_too_long_by_itself_loses_its_beginning() -> None:
    setup = setup_of(PLAIN, rows=[row(), LONG], max_prompt_length=200, **UNTOLD)
    only(told(prompts_fit, setup), WARNING, "1 of 2 rows", "row 1, has", "lose their beginning")
    assert not told(prompts_fit, setup_of(PLAIN, rows=[row(), LONG], max_prompt_length=1000, **UNTOLD))
    assert not told(prompts_fit, setup_of(PLAIN, rows=[row(), LONG], **UNTOLD))


@pytest.mark.parametrize(
    ("rows", "severity"), [([LONG], ERROR), ([row(), LONG], WARNING), ([row()] * 4 + [LONG], NOTE)]
)
def test_rows_that_are_left_out_count_by_their_share(rows: list[dict[str, object]], severity: Severity) -> None:
    of_setup = {"drops_overlong": True}
    [finding] = prompts_fit(setup_of(PLAIN, rows=rows, max_prompt_length=200, of_setup=of_setup, **UNTOLD))
    assert finding.severity is severity
    assert ("no sample is left" if severity is ERROR else "left out") in finding.what


def test_a_call_that_fits_into_no_turn_or_response_is_a_warning() -> None:
    only(told(turns_fit, setup_of(PLAIN, max_action_length=5)), WARNING, "max_action_length is 5")
    only(told(turns_fit, setup_of(PLAIN, max_response_length=90)), WARNING, "nothing is left for an answer")
    assert not told(turns_fit, setup_of(PLAIN, max_response_length=2000, max_action_length=1000))


def test_a_call_that_is_longer_than_a_response_is_an_error() -> None:
    only(told(turns_fit, setup_of(PLAIN, max_response_length=5)), ERROR, "max_response_length is 5")


def test_an_observation_that_may_fill_the_response_is_noted() -> None:
    [finding] = turns_fit(setup_of(PLAIN, TOOLS[:1], max_response_length=300, max_obs_length=512))
    assert finding.severity is NOTE
    assert "max_obs_length=512" in finding.what


def test_prompt_and_response_must_fit_into_the_model() -> None:
    lengths = {"max_prompt_length": 600, "max_response_length": 500, "max_obs_length": 64}
    only(
        told(turns_fit, setup_of(PLAIN, **lengths, max_model_len=1000)), WARNING, "1100 tokens", "max_model_len is 1000"
    )
    of_setup = {"context_length": 1024}
    only(told(turns_fit, setup_of(PLAIN, **lengths, of_setup=of_setup)), WARNING, "positions for 1024")
    assert not told(turns_fit, setup_of(PLAIN, **lengths, max_model_len=1100, of_setup={"context_length": 1100}))
