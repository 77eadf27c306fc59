"""What a retrieval server is asked and how its answer is read: this project's, Search-R1's, or another with the same
``POST /retrieve``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_tool.retrieval.passage import Passage
from verl_tool.util.json_text import excerpt


def request_of(queries: Sequence[str], topk: int) -> dict[str, Any]:
    """The body that asks for at most `topk` passages for each query. Without scores, Search-R1's own server fails."""
    return {"queries": list(queries), "topk": topk, "return_scores": True}


def passages_of(answer: Any, queries: int) -> list[list[Passage]]:
    """For each of `queries` queries its passages, the best first.

    Of ``{"result": [[{"document": {…}, "score"}]]}``, or of documents alone. Raises ValueError that says what is wrong.
    """
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != queries:
        raise ValueError(f"'result' is {excerpt(result)}; it must be a list of {queries}, one for each query")
    return [[_passage(entry) for entry in _list(of_query)] for of_query in result]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"what was found is {excerpt(value)}; it must be a list")
    return value


def _passage(entry: Any) -> Passage:
    document = entry.get("document", entry) if isinstance(entry, dict) else None
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise ValueError(f"a passage is {excerpt(entry)}; it must have a text 'contents'")
    return Passage(str(document.get("id", "")), document["contents"])
