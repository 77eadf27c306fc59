"""Markers that a tokenizer splits or rewrites."""

from __future__ import annotations

import pytest
from doctor_setups import HERMES_LIKE, PLAIN, TOOLS, family, only, setup_of, told
from real_tokenizers import NAMES, shape

from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.checks.finding import Severity
from verl_tool.checks.markers import markers_are_tokens, markers_survive
from verl_tool.formats import ALL_FORMATS

QWEN = family("Qwen-Qwen3-0.6B", "<|im_end|>")


def test_markers_that_are_tokens_are_no_finding() -> None:
    assert not told(markers_are_tokens, setup_of(QWEN, formats=["hermes"], mtrl_role="tool"))


def test_a_marker_that_the_template_writes_and_the_tokenizer_splits_is_a_warning() -> None:
    words = ("splits markers of the format 'hermes'", "'<tool_call>' is", "of one model")
    only(told(markers_are_tokens, setup_of(HERMES_LIKE)), Severity.WARNING, *words)


def test_the_control_tokens_of_another_model_s_format_are_a_warning() -> None:
    setup = setup_of(QWEN, formats=["mistral"], mtrl_role="tool")
    only(told(markers_are_tokens, setup), Severity.WARNING, "'[TOOL_CALLS]' is 12 tokens")


def test_markers_that_are_spelled_out_in_any_model_are_only_noted() -> None:
    setup = setup_of(PLAIN, TOOLS[1:2], enable_mtrl=False, action_stop_tokens=["```output"])
    [finding] = markers_are_tokens(setup)
    assert finding.severity is Severity.NOTE
    assert "'```output' is 9 tokens" in finding.what


def test_a_tokenizer_that_rewrites_a_marker_is_an_error() -> None:
    folds = HFTokenizer(shape("t5").tokenizer)
    setup = setup_of(folds, TOOLS[1:2], enable_mtrl=False, action_stop_tokens=["</PYTHON>"])
    findings = told(markers_survive, setup)
    assert findings
    assert all(severity is Severity.ERROR and "no call marked by" in text for severity, text in findings)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "t5"])
def test_the_tokenizers_of_today_s_models_rewrite_deepseek_s_markers_at_most(name: str) -> None:
    """Those of SentencePiece read ``▁`` as a blank."""
    tokenizer = HFTokenizer(shape(name).tokenizer)
    for fmt in ALL_FORMATS:
        setup = setup_of(tokenizer, formats=[fmt.name], mtrl_sep="{obs}")
        blanks = fmt.name == "deepseek" and "▁" not in tokenizer.decode(tokenizer.encode("▁"))
        assert bool(told(markers_survive, setup)) is blanks, fmt.name


def test_without_tools_nothing_is_looked_at() -> None:
    setup = setup_of(HERMES_LIKE, enable_agent=False)
    assert not [*markers_are_tokens(setup), *markers_survive(setup)]
