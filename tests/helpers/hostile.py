"""Hostile requests, and checks that every answer must pass."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st
from starlette.types import ASGIApp

ANSWER_SECONDS = 30.0
_ADDITIONS, _ADDITION_SECONDS = 300_000, 40e-9


def _pace() -> float:
    """Return how many times slower than most this machine is: CPU time of an addition, in that of an ordinary one."""
    began = time.thread_time()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return (time.thread_time() - began) / _ADDITIONS / _ADDITION_SECONDS


MAX_CALLBACK_SECONDS = 0.05 * max(1.0, _pace())
"""CPU time limit of one callback of the event loop, longer on a slow machine."""
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3.5, 10**9, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, math.nan, math.inf, -math.inf),
    *("", " ", "x" * 5000, "\ud800", "\x00", "a\nb", "\u202e", "\u00e9" * 300, "../x", "a/" * 200 + "b", "=" * 8),
    *([], {}, [[]], [None], [""], [-1, 10**9], ["a"] * 5000, [0] * 5000, [{}] * 300, {"": ""}, {"a": {"b": [1]}}),
    {f"k{i}": i for i in range(2000)},
    {"x" * 3000: "y"},
)
"""Values that replace the value of a field."""
RAW_BODIES: tuple[bytes, ...] = (
    *(b"", b" ", b"null", b"1", b'"x"', b"[]", b"{}", b"{", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}{}", b'{"a":', b"NaN"),
    *(b"9" * 5000, b'{"a":' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 5000, b'{"a":"\x00"}', b'{"a":"\\ud800'),
    b"[" + b"[]," * 400_000 + b"[]]",
    b'{"trajectory_ids":[' + b'"",' * 300_000 + b'""],"actions":[]}',
)
"""Complete bodies, which mostly are not JSON."""
ODD_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    *((b"content-length", value) for value in (b"-1", b"1e3", b"9" * 30, b"9" * 5000, b"")),
    *(
        (b"content-type", value)
        for value in (b"", b"multipart/form-data", b"application/json; charset=utf-16", b"\xff")
    ),
    *((b"content-encoding", value) for value in (b"gzip", b"br, gzip", b"\xff")),
    *((b"authorization", value) for value in (b"", b"Bearer", b"Bearer \xff", b"x" * 9000)),
    *((b"x-verl-tool-forwarded", value) for value in (b"1", b"0", b"\xff")),
    *((name, b"x\ty") for name in (b"x-request-id", b"x-verl-tool-peer-key", b"origin", b"host", b"expect", b"te")),
)


def odd_bodies(good: Sequence[dict[str, Any]]) -> st.SearchStrategy[bytes]:
    """Generate variants of good bodies (replaced, wrapped or new fields, cut short) and those of `RAW_BODIES`."""
    value = st.sampled_from(ODD_VALUES) | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )
    names = st.sampled_from(sorted({name for body in good for name in body})) | st.text(max_size=10)
    changes = st.dictionaries(names, value | value.map(lambda v: [v]), max_size=3)
    changed = st.builds(lambda body, further: json.dumps({**body, **further}).encode(), st.sampled_from(good), changes)
    cut = st.builds(lambda body, end: body[: end % (len(body) + 1)], changed, st.integers(0, 10_000))
    return changed | changed | cut | st.sampled_from(RAW_BODIES) | st.binary(max_size=60)


def odd_headers() -> st.SearchStrategy[list[tuple[bytes, bytes]]]:
    """Generate headers, mostly none."""
    return st.just([]) | st.lists(st.sampled_from(ODD_HEADERS), max_size=3)


async def ask(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Iterable[tuple[bytes, bytes]] = (),
    parts: int = 1,
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body of one answer of an app in this process. The body is sent in so many parts."""
    size = max(1, -(-len(body) // parts))
    chunks = [body[start : start + size] for start in range(0, len(body), size)] or [b""]
    incoming = [{"type": "http.request", "body": c, "more_body": i < len(chunks) - 1} for i, c in enumerate(chunks)]
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0) if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), ANSWER_SECONDS)
    answer = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), answer


@contextmanager
def longest_callback() -> Iterator[list[float]]:
    """Measure the longest callback of the event loop: CPU seconds of its thread, as the list's one entry."""
    run, longest = asyncio.Handle._run, [0.0]

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began)

    gc.freeze()  # as a replica does
    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
    try:
        yield longest
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.unfreeze()


def check_answer(status: int, headers: dict[bytes, bytes], body: bytes) -> None:
    """Check an answer: no server failure, and a readable error."""
    assert status < 500 or (status == 503 and int(headers[b"retry-after"]) > 0), (status, body[:500])
    if status >= 400:
        error = json.loads(body)["error"]
        assert len(error["message"]) > 10
        assert len(body) < 10_000, "an error does not repeat what was sent"
        assert error["type"]
