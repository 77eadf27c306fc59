"""``python -m verl_tool.servers.tests.test_web_search_tool web_search --url=http://localhost:5000/get_observation``

It asks the server's provider for two queries, which cost what they cost; all else comes from the server's memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from verl_tool.servers.tests.live_check import LiveCase, command_line, examples, one_by_one
from verl_tool.servers.tests.test_search_retrieval_tool import BATCH, WRONG, batch_case, search, several, wrong_case

QUERIES = ("capital of France", "who painted the Mona Lisa")
_FORM = re.compile(r"\[1\] [^\n]*\nhttps?://\S+\n", re.MULTILINE)

CASES = (
    examples(seconds=100.0),
    LiveCase("title and address of pages", one_by_one(search(QUERIES[0], _FORM)), 100.0),
    LiveCase("several queries in one call", one_by_one(several(QUERIES)), 100.0),
    batch_case(QUERIES, f"a batch of {BATCH} trajectories has one answer", 100.0),
    wrong_case(WRONG),
)


def _cases(
    tool: Annotated[str, typer.Option("--tool", help="web_search, google_search or bing_search.")] = "web_search",
) -> Sequence[LiveCase]:
    return CASES


app = command_line(__name__, "web_search", "web_search", _cases)
