"""``python -m verl_tool.servers.tests.test_web_page_tool web_page --url=http://localhost:5000/get_observation``

It reads one page, that of ``--page``, which must be there.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from verl_tool.servers.tests.live_check import DEFAULT_URL, ApiKey, CheckFailed, LiveCase, Probe, Url, check

_PRIVATE = ("http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/", "http://[fd00:ec2::254]/")


def _hermes(**arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'web_page', 'arguments': arguments})}\n</tool_call>"


class _Checks:
    """The cases, of one page."""

    def __init__(self, page: str) -> None:
        self._page = page

    async def read(self, probe: Probe) -> None:
        """In tags and as JSON."""
        for action in (f"<web_page>{self._page}</web_page>", _hermes(url=self._page)):
            result = await probe.expect(action, "part 1 of ")
            if "cannot be read" in result.observation:
                raise CheckFailed(result.observation[:300])

    async def links(self, probe: Probe) -> None:
        """Some page has none."""
        await probe.expect(_hermes(url=self._page, links=True), "links")

    async def beyond(self, probe: Probe) -> None:
        """A part that there is not."""
        await probe.expect(_hermes(url=self._page, page=10_000), "there is no part 10000; the last one is ")

    async def wrong(self, probe: Probe) -> None:
        """Calls that make no sense."""
        for action in ("<web_page> </web_page>", _hermes(page=2), _hermes(url=self._page, page=0)):
            if (await probe.answer(action)).valid:
                raise CheckFailed(f"{action!r} was taken")

    async def no_page(self, probe: Probe) -> None:
        """What is no page."""
        for address in ("file:///etc/passwd", "who painted it", "ftp://example.org/"):
            await probe.expect(f"<web_page>{address}</web_page>", "cannot be read")

    async def private(self, probe: Probe) -> None:
        """Of a cloud, of a private network, in IPv6."""
        for address in _PRIVATE:
            await probe.expect(f"<web_page>{address}</web_page>", "is not a public address")


def cases(page: str, public_only: bool = True) -> tuple[LiveCase, ...]:
    """What must hold of a server that can read `page`; `public_only`: and no private address."""
    of = _Checks(page)
    return (
        LiveCase("a page in tags and Hermes JSON", of.read, 60.0),
        LiveCase("its links", of.links, 60.0),
        LiveCase("a part that there is not", of.beyond, 60.0),
        LiveCase("what is no call says why", of.wrong),
        LiveCase("what is no page says why", of.no_page),
        *((LiveCase("private addresses are refused", of.private),) if public_only else ()),
    )


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check a live server's reader of pages.")


@app.callback()
def keep_the_command_name() -> None:
    """Typer would leave out the name of a single command."""


Page = Annotated[str, typer.Option("--page", help="Address of a page that is there.")]
Private = Annotated[bool, typer.Option("--private", help="The server permits private addresses.")]


@app.command("web_page")
def run(
    url: Url = DEFAULT_URL, api_key: ApiKey = None, page: Page = "https://example.org", private: Private = False
) -> None:
    """Check a live server's reader of pages, case by case."""
    check(url, api_key, "web_page", cases(page, public_only=not private))


if __name__ == "__main__":
    app()
