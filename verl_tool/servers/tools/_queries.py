"""The queries of a call, for the tools that search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from verl_tool.formats import Call
from verl_tool.servers.tools.base import InvalidCall, Tool

MAX_QUERIES = 16
"""Of one call."""
MAX_QUERY_CHARACTERS = 2000
_KEYS = ("queries", "query_list", "query", "input")


class QueryTool(Tool):
    """``{"queries": […]}``, or a text that is one query."""

    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "queries": {
                "type": "array",
                "items": {"type": "string"},
                "description": f"what to search for; at most {MAX_QUERIES} queries",
            }
        },
        "required": ["queries"],
    }


def queries_of(call: Call, max_characters: int = MAX_QUERY_CHARACTERS) -> list[str]:
    """The queries of a call. Raises InvalidCall with words for the model."""
    arguments = call.arguments
    if arguments is None:
        value: object = call.input
    elif len(arguments) == 1 and (key := next(iter(arguments))) in _KEYS:
        value = arguments[key]
    else:
        raise InvalidCall('give the argument "queries" and no other: {"queries": ["first query", "second query"]}')
    queries = [value] if isinstance(value, str) else value
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise InvalidCall('"queries" must be a list of texts: {"queries": ["first query", "second query"]}')
    queries = [query.strip() for query in queries]
    if not queries or not all(queries):
        raise InvalidCall("the query is empty; write what to search for")
    if len(queries) > MAX_QUERIES:
        raise InvalidCall(f"{len(queries)} queries in one call; at most {MAX_QUERIES} are searched for")
    longest = max(map(len, queries))
    if longest > max_characters:
        raise InvalidCall(f"a query has {longest} characters; at most {max_characters} are searched for")
    return queries


def joined_answers(queries: Sequence[str], texts: Sequence[str]) -> str:
    """What the model reads. Of several queries, each stands before its answer."""
    if len(queries) == 1:
        return texts[0]
    return "\n\n".join(f"Query: {query}\n{text}" for query, text in zip(queries, texts, strict=True))
