"""The readable text of a page. HTML is parsed in the sandbox: a page may be made to break its reader, or to slow it."""

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
"""Wall time for one page, of which the processor's is a fraction of a second."""
_MEMORY_BYTES = 1 << 30
_OUTPUT_BYTES = 16 << 20
_LONGEST_TEXT = 500_000
"""Characters that are read of a page that is no HTML; as `inside.read_page` has it of others."""
_SLOW_CODECS = ("punycode", "idna", "undefined")
_PROGRAM = resources.files("verl_tool.web.inside").joinpath("read_page.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Readable:
    """What there is to read on a page."""

    url: str
    """After all redirects."""
    title: str
    text: str
    """Markdown, if the page was HTML."""
    links: tuple[tuple[str, str], ...]
    """Words and address of each."""


def new_pool(workers: int | None, required_level: Level) -> SandboxPool:
    """A pool whose processes have the parser loaded; not started. Raises StartError if it is not installed."""
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
    """Raises PageUnavailableError if the page breaks its reader, and SandboxError if the sandbox fails."""
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
    """Its first characters. Codecs that are written in Python may take minutes for what a page can hold."""
    body, charset = page.body[: 4 * _LONGEST_TEXT], page.charset or "utf-8"
    try:
        name = codecs.lookup(charset).name
        return body.decode("utf-8" if name in _SLOW_CODECS else name, "replace")[:_LONGEST_TEXT]
    except (LookupError, UnicodeError):
        return body.decode("utf-8", "replace")[:_LONGEST_TEXT]
