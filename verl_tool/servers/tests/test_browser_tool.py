"""``python -m verl_tool.servers.tests.test_browser_tool browser --url=http://localhost:5000/get_observation --page=…``

Any page that the server may open will do: nothing is known of what it shows.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from verl_tool.protocol import FaultKind
from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, one_by_one, together

BATCH = 3
_PRIVATE = ("http://169.254.169.254/", "http://127.0.0.1:1234/", "http://localhost/")
_NOT_OF_THE_WEB = ("file:///etc/passwd", "data:text/html,x", "chrome://version", "javascript:f()")


def cases(
    page: Annotated[str, typer.Option("--page", help="Address of a page that the server's allowed_hosts cover.")],
) -> tuple[LiveCase, ...]:
    """What must hold of a server that may open `page`."""
    shown = re.compile(re.escape(page))
    forms = (f'<browser>goto("{page}")</browser>', f"```goto [{page}]```", call("browser", action="goto", url=page))
    failing = re.compile(r"not among the allowed|ERR_|no public address")
    return (
        LiveCase("actions in tags, fences and JSON", one_by_one(*(LiveTurn(f, (shown,)) for f in forms))),
        LiveCase("the row's page is open at first", one_by_one(LiveTurn("", (shown,), extra={"url": page}))),
        LiveCase(
            "pages are the trajectory's", one_by_one((LiveTurn(forms[0], (shown,)), LiveTurn("```none```", (shown,))))
        ),
        LiveCase(
            "private addresses are not reached",
            one_by_one(*(LiveTurn(f'<browser>goto("{url}")</browser>', (failing,)) for url in _PRIVATE)),
        ),
        LiveCase(
            "only addresses of the web are opened",
            one_by_one(
                *(LiveTurn(f'<browser>goto("{url}")</browser>', ("cannot be opened",)) for url in _NOT_OF_THE_WEB)
            ),
        ),
        LiveCase(
            "what is no action", one_by_one(LiveTurn("<browser>fly(1)</browser>", ("is no action",), valid=False))
        ),
        LiveCase(
            "a row cannot widen the allowed hosts",
            one_by_one(
                LiveTurn("<browser>noop(0)</browser>", extra={"allowed_hosts": ["*"]}, fault=FaultKind.MISCONFIGURED)
            ),
        ),
        LiveCase(f"a batch of {BATCH} trajectories", together(*(LiveTurn(forms[0], (shown,)) for _ in range(BATCH)))),
        LiveCase("the last word ends the trajectory", one_by_one(LiveTurn("```stop [42]```", done=True))),
    )


app = command_line(__name__, "browser", "browser", cases)
