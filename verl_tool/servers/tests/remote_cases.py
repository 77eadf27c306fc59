"""Cases of the tools whose programs a service elsewhere runs. Python is all that they ask of it."""

from __future__ import annotations

import json

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe

TIMEOUT_SECONDS = 120.0
"""Deadline of the cases that wait for the service's own limits."""
TRAJECTORIES = 16


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        if "bash" not in action:
            await probe.expect(action, "2")


async def _forms(probe: Probe) -> None:
    for action in ("<python>print(40 + 2)</python>", "<PYTHON>print(42)</PYTHON>", "```py\nprint(42)\n```"):
        await probe.expect(action, "42")
    arguments = {"language": "python3", "code": "print(input()[::-1])", "stdin": "olleh"}
    await probe.expect(
        f"<tool_call>{json.dumps({'name': probe.tool.name, 'arguments': arguments})}</tool_call>", "hello"
    )
    await probe.expect(_python("print(input())"), "from the row", extra={"stdin": "from the row"})


async def _endings(probe: Probe) -> None:
    await probe.expect(_python("print('before')\n1 / 0"), "before", "ZeroDivisionError: division by zero")
    await probe.expect(_python("x = 1"), "no output")
    await probe.expect(_python("import os; os._exit(3)"), "Exit code: 3")


async def _timeout(probe: Probe) -> None:
    await probe.expect(_python("while True: pass"), "Execution timed out")


async def _no_language(probe: Probe) -> None:
    call = {"name": probe.tool.name, "arguments": {"language": "no-such", "code": "x"}}
    result = await probe.answer(f"<tool_call>{json.dumps(call)}</tool_call>")
    if result.valid or "is not served here" not in result.observation:
        raise CheckFailed(f"a language that there is not: valid={result.valid}, {result.observation!r:.200}")


async def _batch(probe: Probe) -> None:
    requests = [StepRequest(probe.new_id(), _python(f"print({n} * 1000 + 7)")) for n in range(TRAJECTORIES)]
    for n, result in enumerate(await probe.answers(requests)):
        if f"\n{n * 1000 + 7}\n" not in result.observation:
            raise CheckFailed(f"entry {n} of the batch got {result.observation!r:.100}")


REMOTE_CASES = (
    LiveCase("every example action of GET /tools in Python", _formats),
    LiveCase("tags, fences, JSON calls and stdin", _forms),
    LiveCase("errors, exit codes, no output", _endings),
    LiveCase("time limit", _timeout, TIMEOUT_SECONDS),
    LiveCase("a language that there is not", _no_language),
    LiveCase(f"a batch of {TRAJECTORIES} trajectories", _batch, TIMEOUT_SECONDS),
)
