"""``python -m verl_tool.servers.tests.test_search_retrieval_tool search --url=http://localhost:5000/get_observation``

The corpus is the server's, so nothing is asked of what is found but its form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, examples, one_by_one, together

BATCH = 64
QUERIES = ("the capital of a country", "a river", "who painted it")
_SEARCH_R1 = re.compile(r"\A\n\n<information>(?P<found>\S.*\S|\S)</information>\n\n\Z", re.DOTALL)
_PASSAGE = re.compile(r"(?:^|>)Doc \d+\(Title: ", re.MULTILINE)
_ODD = ("\x00", "🦊 ≠ ∅", '"; DROP TABLE', "</information>", "a" * 2000)


def search(query: str, *contains: str | re.Pattern[str]) -> LiveTurn:
    """A query in tags."""
    return LiveTurn(f"<search>{query}</search>", contains)


def several(queries: Sequence[str]) -> LiveTurn:
    """One call with all queries."""
    return LiveTurn(call("search", queries=queries), tuple(f"Query: {query}\n" for query in queries))


def batch_case(queries: Sequence[str], name: str, seconds: float) -> LiveCase:
    """Each query alone, then in a batch of 64, where it is answered alike."""
    batch = [search(queries[i % len(queries)]) for i in range(BATCH)]
    count = len(queries)
    return LiveCase(
        name,
        [*one_by_one(*map(search, queries)), *together(*batch)],
        seconds,
        lambda answers: all(answer == answers[i % count] for i, answer in enumerate(answers[count:])),
    )


def wrong_case(words: dict[str, str]) -> LiveCase:
    """Actions that hold no query, and what they are answered with."""
    return LiveCase(
        "what is no query says why",
        one_by_one(*(LiveTurn(action, (text,), valid=False) for action, text in words.items())),
    )


def _adds_up(answers: Sequence[str]) -> bool:
    """Whether there are as many passages together as one by one."""
    at_once, *alone = (len(_PASSAGE.findall(answer)) for answer in answers)
    return at_once == sum(alone)


WRONG = {
    "<search> </search>": "the query is empty",
    call("search", queries=["a", 5]): "must be a list of texts",
    call("search", query="a", count=5): 'the argument "queries" and no other',
    f"<search>{'a' * 2001}</search>": "has 2001 characters; at most ",
}

CASES = (
    examples(),
    LiveCase("the observation is that of Search-R1", one_by_one(search(QUERIES[0], "Doc 1(Title: ", _SEARCH_R1))),
    LiveCase("several queries in one call", one_by_one(several(QUERIES), *map(search, QUERIES)), holds=_adds_up),
    LiveCase(
        "one query has one answer",
        one_by_one(*[search(QUERIES[1])] * 2),
        holds=lambda answers: answers[0] == answers[1],
    ),
    batch_case(QUERIES, f"a batch of {BATCH} trajectories", 30.0),
    wrong_case(
        {
            **WRONG,
            call("search", queries=[]): "the query is empty",
            call("search", queries=["a"] * 17): "17 queries in one call; at most 16",
            f"<search>{'a' * 2001}</search>": "has 2001 characters; at most 2000",
        }
    ),
    LiveCase("odd queries are answered", one_by_one(*(search(query, "</information>") for query in _ODD))),
)

app = command_line(__name__, "search", "search_retrieval", CASES)
