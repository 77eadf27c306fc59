"""``python -m verl_tool.servers.tests.test_calculator_tool calculator --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import re

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, command_line, examples, one_by_one, together

BATCH = 64
_SUMS = {"13.1-3": "10.1", "2**10": "1024", "-7 // 2": "-4", "sqrt(16) + max(1, 2)": "6", "0.1+0.2": "0.3"}
_ERRORS = {"1/0": "division by zero", "1 +": "ends too early", "__import__('os')": "cannot read it", "x": "is unknown"}
_ENDLESS = ("9**9**9**9", "factorial(99999999)", "(" * 900, "1" * 100_000)


def _sum(expression: str, *contains: str | re.Pattern[str]) -> LiveTurn:
    return LiveTurn(f"<calculator>{expression}</calculator>", contains)


CASES = (
    examples("10.1"),
    LiveCase("arithmetic", one_by_one(*(_sum(each, f"\n{answer}\n") for each, answer in _SUMS.items()))),
    LiveCase("what cannot be calculated says why", one_by_one(*(_sum(*each) for each in _ERRORS.items()))),
    LiveCase("no expression hangs", one_by_one(*(_sum(each, "Error") for each in _ENDLESS))),
    LiveCase(
        "several calls in one action, in order",
        one_by_one(_sum("1+1</calculator> and <calculator>20+1", re.compile(r"\n2\n.*\n21\n", re.DOTALL))),
    ),
    LiveCase(
        f"a batch of {BATCH} trajectories",
        together(*(_sum(f"{i}*1000+7", f"\n{i * 1000 + 7}\n") for i in range(BATCH))),
    ),
    LiveCase(
        "text without a call is not valid",
        one_by_one(LiveTurn("I think that it is 7.", (re.compile("."),), valid=False)),
    ),
)

app = command_line(__name__, "calculator", "calculator", CASES)
