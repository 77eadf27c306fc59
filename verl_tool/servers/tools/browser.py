"""Lets the model use a browser: ``<browser>click("12")</browser>``, and what it reads is the page.

One chromium serves all trajectories of a replica, and each has a context of its own. Actions have BrowserGym's names,
or are WebArena's commands as verl-tool's ``text_browser`` takes them. The row may bring ``url``, the page that is open
at first, and ``allowed_hosts``, which narrow those of the server. Needs the extra ``browser`` and chromium.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from verl_tool.browser.action_syntax import ActionSyntaxError, BrowserAction, parse_actions, parse_arguments
from verl_tool.browser.actions import bind, validate_address
from verl_tool.browser.browser_session import BrowserLimits, BrowserLostError, BrowserSession, StepOutcome
from verl_tool.browser.chromium import BrowserSettings, Chromium
from verl_tool.content.parts import read_media
from verl_tool.errors import ConfigError, ToolFault, VerlToolError
from verl_tool.formats import ALL_FORMATS, WEBARENA, Call, Tag, guard
from verl_tool.formats.tags import NAME_TAGS, OwnTagFormat
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.backends.egress import EgressProxy, narrow_hosts
from verl_tool.sandbox.isolation.levels import Level
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolOptions, ToolResult

BROWSER_TAGS = OwnTagFormat(NAME_TAGS, [Tag.named("browser")])
guard(BROWSER_TAGS)
HOSTS_FIELD, URL_FIELD = "allowed_hosts", "url"


class BrowserToolOptions(ToolOptions):
    """What pages may reach and take."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts that pages may reach: ``example.org``, ``*.example.org``, ``127.0.0.1:8080``; without a port, 80 and 443. A
    name that leads to an address that is not public is not reached: list the address. Nothing is reached by default."""
    timeout_seconds: float = Field(default=20.0, gt=0)
    """Of one call; a page that does not answer by then is closed."""
    max_output_length: int = Field(default=8000, ge=200, le=200_000)
    """Characters of an observation."""
    screenshots: bool = False
    """Show a screenshot with every observation, to models that read images. The action ``screenshot`` shows one."""
    max_contexts: int = Field(default=64, ge=1)
    """Trajectories at once in each replica."""
    idle_seconds: float | None = Field(default=None, gt=0)
    """A trajectory that is idle for so long loses its pages; None: the server's ``--state_ttl``."""
    max_page_mb: int = Field(default=512, ge=64)
    """Memory of one tab, megabytes of 2**20 bytes; a page that takes more is closed."""
    max_browser_mb: int = Field(default=8192, ge=512)
    """Memory of all; above it, the largest page is closed."""
    max_page_cpu_seconds: int = Field(default=300, ge=1)
    """CPU time of one tab; a page that takes more is closed."""
    max_load_mb: int = Field(default=256, ge=1)
    """What the pages of a trajectory may load."""
    max_tabs: int = Field(default=5, ge=1, le=50)
    """Of one trajectory."""
    width: int = Field(default=1280, ge=100, le=4096)
    """Of the window, pixels."""
    height: int = Field(default=720, ge=100, le=4096)
    isolation: str = Level.full.name
    """The lowest level of isolation with which the tool agrees to start: ``full`` or ``none``."""
    executable: Path | None = None
    """Of chromium; None: the one of the system."""


class BrowserTool(Tool):
    """One chromium; a trajectory's state is its context."""

    name = "browser"
    aliases = ("text_browser",)
    description = (
        "Uses a web browser and returns the page, whose elements are numbered. Actions: goto(url), click(id), "
        "fill(id, text), type(id, text), press(id, key), select_option(id, option), hover(id), scroll(x, y), "
        "go_back(), new_tab(), tab_focus(index), tab_close(), screenshot(), noop(wait_ms), send_msg_to_user(text)."
    )
    parameters: ClassVar = {
        "type": "object",
        "properties": {"action": {"type": "string", "description": 'calls, one a line, such as click("12")'}},
        "required": ["action"],
    }
    example_actions = (
        '<browser>click("12")</browser>',
        '```browser\nfill("7", "Paris")\npress("7", "Enter")\n```',
        '<tool_call>\n{"name": "browser", "arguments": {"action": "click", "id": 12}}\n</tool_call>',
        "```click [12]```",
        "```type [7] [Paris] [1]```",
    )
    formats = (BROWSER_TAGS, WEBARENA, *ALL_FORMATS)
    stateful = True
    Options = BrowserToolOptions
    options: BrowserToolOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        chosen = self.options
        EgressProxy(chosen.allowed_hosts)  # raises ConfigError for a host that is none
        self.max_live, self.ttl_seconds = chosen.max_contexts, chosen.idle_seconds  # type: ignore[misc]
        self._settings = BrowserSettings(
            chosen.executable,
            chosen.isolation,
            chosen.max_page_mb,
            chosen.max_browser_mb,
            chosen.max_page_cpu_seconds,
        )
        self._limits = BrowserLimits(
            chosen.timeout_seconds,
            chosen.max_output_length,
            chosen.max_tabs,
            chosen.max_load_mb,
            chosen.width,
            chosen.height,
        )
        self._browser: Chromium | None = None
        self._starting = asyncio.Lock()

    def isolation_in_force(self) -> str:
        return "" if self._browser is None else self._browser.describe_isolation()

    async def start(self) -> None:
        """Raises StartError if there is no Playwright or no chromium, IsolationError if it cannot be confined."""
        await self._running_browser()

    async def close(self) -> None:
        if self._browser is not None:
            await self._browser.close()

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> BrowserSession:
        """Raises ToolFault: nothing here is the model's doing."""
        hosts, url = self._hosts_and_page(extra)
        try:
            browser = await self._running_browser()
        except VerlToolError as error:
            raise ToolFault(FaultKind.SANDBOX, f"chromium does not start: {error}", retryable=True) from error
        try:
            session = await BrowserSession.open(browser, hosts, self._limits)
        except BrowserLostError as error:
            raise ToolFault(FaultKind.SANDBOX, f"chromium opens no context: {error}", retryable=True) from error
        try:
            if url:
                await _open_page(session, url)
        except BaseException:
            await session.close()
            raise
        return session

    async def close_state(self, state: BrowserSession) -> None:
        await state.close()

    def recognise(self, action: str) -> list[Call]:
        # Nothing at all is how verl-tool's clients ask for the first page.
        return super().recognise(action) if action.strip() else [Call(self.name, "", 0, len(action), BROWSER_TAGS)]

    async def run(self, call: Call, context: Context) -> ToolResult:
        session: BrowserSession = context.state
        try:
            actions = parse_actions(call.input) if call.arguments is None else parse_arguments(call.arguments)
            for action in actions:
                bind(action)
        except ActionSyntaxError as error:
            raise InvalidCall(str(error)) from error
        if not call.input.strip() and call.arguments is None:
            actions = []
        if self.options.screenshots:
            actions = [*actions, BrowserAction("screenshot")]
        try:
            outcome = await session.perform(actions)
        except BrowserLostError as error:
            raise ToolFault(FaultKind.STATE_LOST, str(error), retryable=False) from error
        return _result(outcome)

    def _hosts_and_page(self, extra: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        """What a trajectory may reach, and the page that is open at first. Raises ToolFault."""
        hosts, url = extra.get(HOSTS_FIELD), extra.get(URL_FIELD) or ""
        try:
            if hosts is None:
                hosts = self.options.allowed_hosts
            elif not isinstance(hosts, (list, tuple)) or not all(isinstance(host, str) for host in hosts):
                raise ConfigError(f"the row's {HOSTS_FIELD} is {hosts!r:.100}; give a list of hosts")
            hosts = narrow_hosts(self.options.allowed_hosts, hosts)
            if not isinstance(url, str):
                raise ConfigError(f"the row's {URL_FIELD} is {url!r:.100}; give an address")
            if url:
                narrow_hosts(hosts, [urlsplit(validate_address(url)).netloc])
        except (ConfigError, ActionSyntaxError) as error:
            raise ToolFault(FaultKind.MISCONFIGURED, f"tool {self.name}: {error}", retryable=False) from error
        return hosts, url

    async def _running_browser(self) -> Chromium:
        """The browser, another one if it has crashed."""
        async with self._starting:
            if self._browser is not None and not self._browser.alive:
                crashed, self._browser = self._browser, None
                await crashed.close()
            if self._browser is None:
                browser = Chromium(self._settings)
                await browser.start()
                self._browser = browser
            return self._browser


async def _open_page(session: BrowserSession, url: str) -> None:
    """Raises ToolFault."""
    try:
        opened = await session.perform([BrowserAction("goto", [url])])
    except BrowserLostError as error:
        raise ToolFault(FaultKind.SANDBOX, str(error), retryable=True) from error
    if opened.error:
        words = f"the row's url {url!r:.200} does not open: {opened.text:.300}"
        raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True)


def _result(outcome: StepOutcome) -> ToolResult:
    if outcome.image is None:
        return ToolResult(outcome.text, error=outcome.error, done=outcome.done)
    return ToolResult(parts=[f"{outcome.text}\n", read_media(outcome.image)], error=outcome.error)
