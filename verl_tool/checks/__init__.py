"""The checks, one list for the command and for the start of a training. Each is a pure function of what it looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from verl_tool.agent_loop.row import REWARD_COLUMNS
from verl_tool.checks.ends import calls_end, tools_are_called, turns_end
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.lengths import prompts_fit, turns_fit
from verl_tool.checks.markers import markers_are_tokens, markers_survive
from verl_tool.checks.reward import most_frequent_gold
from verl_tool.checks.rows import columns_are_there, ground_truth_leak
from verl_tool.checks.setup import Row, Setup
from verl_tool.checks.template import (
    check_thoughts_preserved,
    check_tools_described,
    observations_render,
    prompts_render,
)
from verl_tool.errors import ConfigError

Check = Callable[[Setup], Iterator[Finding]]

FIRST: tuple[Check, ...] = (prompts_render, observations_render)
"""What the others rely on."""
OTHERS: tuple[Check, ...] = (
    check_tools_described,
    check_thoughts_preserved,
    calls_end,
    tools_are_called,
    turns_end,
    markers_survive,
    markers_are_tokens,
    prompts_fit,
    turns_fit,
)
OF_AGENTS: tuple[Check, ...] = (turns_end, markers_survive, markers_are_tokens)
"""Those that hold for agent programs too, which have prompts and tools of their own."""

RELIED_ON = frozenset(check.__name__ for check in FIRST)
"""Where one of these finds an error, there is no prompt or no turn to look at."""


def examine_rows(rows: Sequence[Row], for_reward: Sequence[str] = REWARD_COLUMNS) -> list[Finding]:
    """What is wrong with rows, whatever the model. `for_reward`: the columns that the reward manager reads."""
    return [
        *_found("columns_are_there", lambda: columns_are_there(rows, for_reward)),
        *_found("ground_truth_leak", lambda: ground_truth_leak(rows)),
        *_found("most_frequent_gold", lambda: most_frequent_gold(rows)),
    ]


def examine(setup: Setup) -> list[Finding]:
    """What the checks of model, loop and tools find. Where the template cannot serve at all, only that is told.

    What costs time is the prompts of the rows, a millisecond each.
    """
    findings = _of_all(FIRST, setup)
    if any(finding.severity is Severity.ERROR for finding in findings):
        return findings
    return findings + _of_all(OTHERS, setup)


def examine_agents_model(setup: Setup) -> list[Finding]:
    """What the checks of a model find that answers an agent program."""
    return _of_all(OF_AGENTS, setup)


def _of_all(checks: Sequence[Check], setup: Setup) -> list[Finding]:
    return [finding for check in checks for finding in _found(check.__name__, functools.partial(check, setup))]


def _found(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What a check finds. One that fails is told, and ends no training."""
    try:
        return list(check())
    except ConfigError as error:
        return [Finding(name, Severity.ERROR, str(error), "")]
    except Exception as error:  # noqa: BLE001 - templates, formats and rows are anybody's
        return [Finding(name, Severity.WARNING, f"the check fails: {type(error).__name__}: {error}", "")]
