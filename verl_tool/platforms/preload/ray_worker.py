"""Run by a raylet in place of Ray's ``setup_worker.py``: the worker is forked from the template, if that can be.

Written for Ray 2.60. A worker of another job or with an environment of its own (a container, another Python) is started
by Ray's.
"""

from __future__ import annotations

import json
import os
import re
import sys
from multiprocessing import resource_tracker
from typing import Any

from verl_tool.platforms.preload.processes import RAY_JOB, Script

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_OWN = ("command_prefix", "override_worker_entrypoint", "java_jars")


def main(arguments: list[str]) -> None:
    """Fork the worker and leave, or become what Ray would start."""
    command = [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))]
    context = json.loads(next((a.removeprefix(_CONTEXT) for a in arguments if a.startswith(_CONTEXT)), "{}"))
    script = next(a for a in arguments if a.endswith(".py"))
    if script == command[0] and f"{_LANGUAGE}PYTHON" in arguments and _forkable(context):
        # The worker gets one of its own.
        nothing = os.open(os.devnull, os.O_RDWR)
        resource_tracker.getfd = lambda: nothing
        before = dict(os.environ)
        os.environ.update({name: _expanded(value) for name, value in context.get("env_vars", {}).items()})
        try:
            Script(command).start()
            os._exit(0)
        except (OSError, EOFError) as error:
            print(f"this worker is started anew, the template does not answer: {error}", file=sys.stderr, flush=True)
            os.environ.clear()
            os.environ.update(before)
    rays = os.path.join(os.path.dirname(script), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, rays, *arguments])


def _forkable(context: dict[str, Any]) -> bool:
    plain = context.get("py_executable", sys.executable) == sys.executable and not any(map(context.get, _OWN))
    return plain and os.environ.get("RAY_JOB_ID") == RAY_JOB


def _expanded(value: str) -> str:
    """As Ray does: variables within are put in, unknown ones are empty."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


if __name__ == "__main__":
    main(sys.argv[1:])
