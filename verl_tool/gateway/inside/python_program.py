"""Calls a user's function or class as the agent of a session.

Arguments: ``FILE.py:NAME`` or ``package.module:NAME``, and the session's id. Standard library only: it runs alone in
the sandbox.
"""

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
from typing import Any

ROW_FILE = ".verl_tool_row.json"
"""In the working directory: the row. It is removed before the user's code is imported."""


@dataclasses.dataclass(frozen=True)
class ProgramSession:
    """What a user's code gets of its session."""

    id: str
    base_url: str
    """Of the OpenAI API, such as ``AsyncOpenAI(base_url=…)`` takes it."""
    anthropic_base_url: str
    key: str = dataclasses.field(repr=False)


def load(target: str) -> Any:
    """The object that `target` names. Exits with a message if there is none."""
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("agent_program", where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found = getattr(module, name, None)
    if found is None:
        sys.exit(f"gateway.program.python={target}: {where} has no {name}")
    run = getattr(found(), "run", None) if inspect.isclass(found) else found
    if not callable(run):
        sys.exit(f"gateway.program.python={target}: {name} is no function and no class with run(session, row)")
    return run


def main() -> None:
    """Run the user's code to its end; an exception ends the program as it ends a script."""
    (target,) = sys.argv[1:]
    with open(ROW_FILE, encoding="utf-8") as file:
        row = json.load(file)
    os.unlink(ROW_FILE)
    env = os.environ
    session_id = env["ANTHROPIC_BASE_URL"].rpartition("/")[2]
    session = ProgramSession(session_id, env["OPENAI_BASE_URL"], env["ANTHROPIC_BASE_URL"], env["OPENAI_API_KEY"])
    running = load(target)(session, row)
    if inspect.isawaitable(running):

        async def wait() -> None:
            await running

        asyncio.run(wait())


if __name__ == "__main__":
    main()
