"""``python -m verl_tool.servers.tests.test_search_retrieval_tool search --url=http://localhost:5000/get_observation``

The corpus is the server's, so nothing is asked of what is found but its form.
"""

from __future__ import annotations

import json
import re

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

BATCH = 64
QUERIES = ("the capital of a country", "a river", "who painted it")
_SEARCH_R1 = re.compile(r"\n\n<information>(?P<found>\S.*\S|\S)</information>\n\n", re.DOTALL)
_PASSAGE = re.compile(r"(?:^|>)Doc \d+\(Title: ", re.MULTILINE)


def _hermes(**arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': arguments})}\n</tool_call>"


def _passages(observation: str) -> int:
    return len(_PASSAGE.findall(observation))


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        await probe.expect(action)


async def _form(probe: Probe) -> None:
    result = await probe.expect(f"<search>{QUERIES[0]}</search>", "Doc 1(Title: ")
    if _SEARCH_R1.fullmatch(result.observation) is None:
        raise CheckFailed(f"not the form of Search-R1: {result.observation!r:.300}")


async def _several(probe: Probe) -> None:
    result = await probe.expect(_hermes(queries=QUERIES), *(f"Query: {query}\n" for query in QUERIES))
    alone = [_passages((await probe.answer(f"<search>{query}</search>")).observation) for query in QUERIES]
    if _passages(result.observation) != sum(alone):
        raise CheckFailed(f"{sum(alone)} passages one by one, together {_passages(result.observation)}")


async def _same(probe: Probe) -> None:
    first, second = [await probe.answer(f"<search>{QUERIES[1]}</search>") for _ in range(2)]
    if first.observation != second.observation:
        raise CheckFailed(f"one query, two answers: {first.observation!r:.200}, {second.observation!r:.200}")


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
        _hermes(queries=[]): "the query is empty",
        _hermes(queries=["a", 5]): "must be a list of texts",
        _hermes(query="a", count=5): 'the argument "queries" and no other',
        _hermes(queries=["a"] * 17): "17 queries in one call; at most 16",
        f"<search>{'a' * 2001}</search>": "has 2001 characters; at most 2000",
    }
    for action, words in wrong.items():
        result = await probe.answer(action)
        if result.valid or words not in result.observation:
            raise CheckFailed(f"{action!r:.80} was answered valid={result.valid}, {result.observation!r:.200}")


async def _odd(probe: Probe) -> None:
    for query in ("\x00", "🦊 ≠ ∅", '"; DROP TABLE', "</information>", "a" * 2000):
        await probe.expect(f"<search>{query}</search>", "</information>")


CASES = (
    LiveCase("every example action of GET /tools", _formats),
    LiveCase("the observation is that of Search-R1", _form),
    LiveCase("several queries in one call", _several),
    LiveCase("one query has one answer", _same),
    LiveCase(f"a batch of {BATCH} trajectories", _batch),
    LiveCase("what is no query says why", _wrong),
    LiveCase("odd queries are answered", _odd),
)

app = command_line("search", "search_retrieval", CASES, "Check the search tool of a live server, case by case.")

if __name__ == "__main__":
    app()
