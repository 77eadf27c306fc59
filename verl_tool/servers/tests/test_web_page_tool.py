"""``python -m verl_tool.servers.tests.test_web_page_tool web_page --url=http://localhost:5000/get_observation``

It reads one page, that of ``--page``, which must be there.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, one_by_one

_PRIVATE = ("http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/", "http://[fd00:ec2::254]/")
_NO_PAGES = ("file:///etc/passwd", "who painted it", "ftp://example.org/")
Page = Annotated[str, typer.Option("--page", help="Address of a page that is there.")]
Private = Annotated[bool, typer.Option("--private", help="The server permits private addresses.")]


def _read(address: str, *contains: str) -> LiveTurn:
    return LiveTurn(f"<web_page>{address}</web_page>", contains)


def cases(page: Page = "https://example.org", private: Private = False) -> tuple[LiveCase, ...]:
    """What must hold of a server that can read `page`, and no private address unless `private`."""
    read = partial(call, "web_page")
    forms = [
        LiveTurn(each, ("part 1 of ",), ("cannot be read",))
        for each in (f"<web_page>{page}</web_page>", read(url=page))
    ]
    beyond = LiveTurn(read(url=page, page=10_000), ("there is no part 10000; the last one is ",))
    wrong = [LiveTurn(each, valid=False) for each in ("<web_page> </web_page>", read(page=2), read(url=page, page=0))]
    found = (
        LiveCase("a page in tags and Hermes JSON", one_by_one(*forms), 60.0),
        LiveCase("its links", one_by_one(LiveTurn(read(url=page, links=True), ("links",))), 60.0),
        LiveCase("a part that there is not", one_by_one(beyond), 60.0),
        LiveCase("what is no call says why", one_by_one(*wrong)),
        LiveCase("what is no page says why", one_by_one(*(_read(each, "cannot be read") for each in _NO_PAGES))),
        LiveCase(
            "private addresses are refused", one_by_one(*(_read(each, "is not a public address") for each in _PRIVATE))
        ),
    )
    return found[:-1] if private else found


app = command_line(__name__, "web_page", "web_page", cases)
