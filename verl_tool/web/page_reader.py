"""Extract the readable text of a page. HTML is parsed in the sandbox, since a page may attack its parser."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from typing import Any

from verl_tool.errors import StartError
from verl_tool.sandbox import Level, Limits, SandboxPool
from verl_tool.web.page_client import Page, PageUnavailableError

READ_SECONDS = 20.0
"""Limit of wall time for one page, which needs only a fraction of a second of CPU time."""
_MEMORY_BYTES = 1 << 30
_OUTPUT_BYTES = 16 << 20
_LONGEST_TEXT = 500_000
"""Maximum number of characters of a page that is not HTML. `inside.read_page` has the same limit for HTML."""
_SLOW_CODECS = ("punycode", "idna", "undefined")
_PROGRAM = resources.files("verl_tool.web.inside").joinpath("read_page.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Readable:
    """The readable content of a page."""

    url: str
    """URL after all redirects."""
    title: str
    text: str
    """Markdown if the page was HTML."""
    links: tuple[tuple[str, str], ...]
    """Text and address of each link."""


def new_pool(workers: int | None, required_level: Level) -> SandboxPool:
    """Make a pool whose processes import the parser, without starting it.

    Raises StartError if the parser is not installed.
    """
    if find_spec("trafilatura") is None:
        raise StartError("pages are read with trafilatura, which is not installed: source scripts/env.sh web")
    limits = Limits(
        wall_seconds=READ_SECONDS,
        memory_bytes=_MEMORY_BYTES,
        processes=8,
        output_bytes=_OUTPUT_BYTES,
        disk_bytes=1 << 20,
    )
    return SandboxPool(
        workers=workers, limits=limits, required_level=required_level, warm_modules=("trafilatura", "lxml.html")
    )


async def readable(page: Page, pool: SandboxPool) -> Readable:
    """Extract the text of a page.

    Raises PageUnavailableError if the page breaks the parser, and SandboxError if the sandbox fails.
    """
    if not page.is_html:
        return Readable(page.url, "", _decoded(page), ())
    head = json.dumps({"url": page.url, "charset": page.charset}).encode()
    result = await pool.run(_PROGRAM, stdin=head + b"\n" + page.body)
    if not result.ok:
        raise PageUnavailableError("the page is malformed, or too large to be read")
    read: dict[str, Any] = json.loads(result.stdout)
    links = tuple((str(words), str(target)) for words, target in read["links"])
    return Readable(page.url, str(read["title"]), str(read["text"]), links)


def _decoded(page: Page) -> str:
    """Decode the beginning of a page, without codecs written in Python, which may take minutes for a malicious page."""
    body, charset = page.body[: 4 * _LONGEST_TEXT], page.charset or "utf-8"
    try:
        name = codecs.lookup(charset).name
        return body.decode("utf-8" if name in _SLOW_CODECS else name, "replace")[:_LONGEST_TEXT]
    except (LookupError, UnicodeError):
        return body.decode("utf-8", "replace")[:_LONGEST_TEXT]
