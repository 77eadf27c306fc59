"""Cases of the tools whose programs a service elsewhere runs. Python is all that they ask of it."""

from __future__ import annotations

from verl_tool.servers.tests.live_check import WAITS, LiveCase, LiveTurn, call, examples, one_by_one, together

TRAJECTORIES = 16


def _python(code: str, *contains: str, **extra: str) -> LiveTurn:
    return LiveTurn(f"```python\n{code}\n```", contains, extra=extra)


def remote_cases(tool: str) -> tuple[LiveCase, ...]:
    """What must hold of `tool`."""
    forms = [
        *(
            LiveTurn(action, ("42",))
            for action in ("<python>print(40 + 2)</python>", "<PYTHON>print(42)</PYTHON>", "```py\nprint(42)\n```")
        ),
        LiveTurn(call(tool, language="python3", code="print(input()[::-1])", stdin="olleh"), ("hello",)),
        _python("print(input())", "from the row", stdin="from the row"),
    ]
    endings = [
        _python("print('before')\n1 / 0", "before", "ZeroDivisionError: division by zero"),
        _python("x = 1", "no output"),
        _python("import os; os._exit(3)", "Exit code: 3"),
    ]
    batch = [_python(f"print({n} * 1000 + 7)", f"\n{n * 1000 + 7}\n") for n in range(TRAJECTORIES)]
    unknown = LiveTurn(call(tool, language="no-such", code="x"), ("is not served here",), valid=False)
    return (
        examples("2", name="every example action of GET /tools in Python", without="bash"),
        LiveCase("tags, fences, JSON calls and stdin", one_by_one(*forms)),
        LiveCase("errors, exit codes, no output", one_by_one(*endings)),
        LiveCase("time limit", one_by_one(_python("while True: pass", "Execution timed out")), WAITS),
        LiveCase("a language that there is not", one_by_one(unknown)),
        LiveCase(f"a batch of {TRAJECTORIES} trajectories", together(*batch), WAITS),
    )
