"""``python -m verl_tool.servers.tests.test_web_search_tool web_search --url=http://localhost:5000/get_observation``

It asks the server's provider for two queries, which cost what they cost; all else comes from the server's memory.
"""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import DEFAULT_URL, ApiKey, CheckFailed, LiveCase, Probe, Url, check

BATCH = 64
QUERIES = ("capital of France", "who painted the Mona Lisa")
_FORM = re.compile(r"\[1\] [^\n]*\nhttps?://\S+\n", re.MULTILINE)


def _hermes(**arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': arguments})}\n</tool_call>"


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        await probe.expect(action)


async def _form(probe: Probe) -> None:
    result = await probe.expect(f"<search>{QUERIES[0]}</search>")
    if _FORM.search(result.observation) is None:
        raise CheckFailed(f"no title and address of a page: {result.observation!r:.300}")


async def _several(probe: Probe) -> None:
    await probe.expect(_hermes(queries=QUERIES), *(f"Query: {query}\n" for query in QUERIES))


async def _batch(probe: Probe) -> None:
    alone = {query: (await probe.answer(f"<search>{query}</search>")).observation for query in QUERIES}
    requested = [QUERIES[i % len(QUERIES)] for i in range(BATCH)]
    requests = [StepRequest(probe.new_id(), f"<search>{query}</search>") for query in requested]
    for query, result in zip(requested, await probe.answers(requests), strict=True):
        if result.observation != alone[query]:
            raise CheckFailed(f"{query!r} in a batch gave {result.observation!r:.200}")


async def _wrong(probe: Probe) -> None:
    wrong = {
        "<search> </search>": "the query is empty",
        _hermes(queries=["a", 5]): "must be a list of texts",
        _hermes(query="a", count=5): 'the argument "queries" and no other',
        f"<search>{'a' * 2001}</search>": "has 2001 characters; at most ",
    }
    for action, words in wrong.items():
        result = await probe.answer(action)
        if result.valid or words not in result.observation:
            raise CheckFailed(f"{action!r:.80} was answered valid={result.valid}, {result.observation!r:.200}")


CASES = (
    LiveCase("every example action of GET /tools", _formats, 100.0),
    LiveCase("title and address of pages", _form, 100.0),
    LiveCase("several queries in one call", _several, 100.0),
    LiveCase(f"a batch of {BATCH} trajectories has one answer", _batch, 100.0),
    LiveCase("what is no query says why", _wrong),
)

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check a live server's search of the web.")


@app.callback()
def keep_the_command_name() -> None:
    """Typer would leave out the name of a single command."""


Name = Annotated[str, typer.Option("--tool", help="web_search, google_search or bing_search.")]


@app.command("web_search")
def run(url: Url = DEFAULT_URL, api_key: ApiKey = None, tool: Name = "web_search") -> None:
    """Check a live server's search of the web, case by case."""
    check(url, api_key, tool, CASES)


if __name__ == "__main__":
    app()
