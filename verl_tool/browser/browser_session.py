"""The browser of one trajectory: a context, its tabs, and what the model reads after each step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from verl_tool.browser.action_syntax import ActionSyntaxError, BrowserAction
from verl_tool.browser.actions import bind
from verl_tool.browser.chromium import Chromium
from verl_tool.browser.egress_router import ContextProxy
from verl_tool.browser.page_reader import MissingElementError
from verl_tool.browser.tab import PageActionError, Tab

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, JSHandle, Page

_URL_CHARACTERS = 300
_NAVIGATION_SECONDS = 15.0
_READ_SECONDS = 10.0


class BrowserLostError(Exception):
    """Chromium, or its driver, has ended."""


class PageLostError(Exception):
    """The page was closed or left, while chromium goes on."""


@dataclass(frozen=True)
class BrowserLimits:
    """What one trajectory may take."""

    step_seconds: float = 20.0
    """Of one call; a page that does not answer by then is closed."""
    max_characters: int = 8000
    """Of an observation."""
    max_tabs: int = 5
    max_load_mb: int = 256
    """What its pages may load together, megabytes of 2**20 bytes."""
    width: int = 1280
    """Of the window, pixels."""
    height: int = 720


@dataclass(frozen=True)
class PageView:
    """What of a page the model reads."""

    exclude: str = ""
    """A CSS selector of what it does not read."""
    shows_address: bool = True
    """Whether title, address and tabs come first."""


@dataclass(frozen=True)
class StepOutcome:
    """What the model reads after a step."""

    text: str
    image: bytes | None = None
    """PNG."""
    error: bool = False
    done: bool = False


DEFAULT_VIEW = PageView()


class BrowserSession:
    """One context. `open` it, and `close` it; one call at a time."""

    def __init__(
        self, browser: Chromium, context: BrowserContext, proxy: ContextProxy, limits: BrowserLimits, view: PageView
    ) -> None:
        self.height = limits.height
        self.wants_image = False
        """Whether this step's observation has a screenshot."""
        self.message: str | None = None
        """What the model sent to the user."""
        self._browser, self._context, self._proxy, self._limits = browser, context, proxy, limits
        self._view = view
        self._tabs: list[Tab] = []
        self._active = 0
        self._next_number = 1
        self.resets = 0
        """How often it was used anew."""
        self._opening = asyncio.Lock()
        """Held while a tab is opened for the model: its page is no popup."""
        self._popups: set[asyncio.Task[None]] = set()
        self._notes: list[str] = []

    @classmethod
    async def open(
        cls, browser: Chromium, hosts: Sequence[str], limits: BrowserLimits, view: PageView = DEFAULT_VIEW
    ) -> BrowserSession:
        """Open a context with one empty tab that reaches `hosts` only.

        Raises ConfigError for a host that is none, and BrowserLostError.
        """
        try:
            context, proxy = await browser.open_context(hosts, limits.max_load_mb << 20, limits.width, limits.height)
        except browser.errors as error:
            raise BrowserLostError(str(error)) from error
        session = cls(browser, context, proxy, limits, view)
        try:
            await session.new_tab()
        except BaseException as error:
            await session.close()
            if isinstance(error, browser.errors):
                raise BrowserLostError(str(error)) from error
            raise
        context.on("page", session._take_popup)
        return session

    @property
    def tab(self) -> Tab:
        """The tab that actions are for."""
        return self._tabs[self._active]

    def finish(self, message: str) -> None:
        """Take what the model says to the user as its last word."""
        self.message = message

    async def perform(
        self, actions: Sequence[BrowserAction], after_each: Callable[[], Awaitable[bool]] | None = None
    ) -> StepOutcome:
        """Perform actions one after the other, up to the first that fails, and read the page.

        `after_each` is called after each action; what it returns ends the step. Raises BrowserLostError.
        """
        try:
            return await self._step(actions, after_each)
        except self._browser.errors as error:
            raise BrowserLostError(f"the browser does not go on: {error}") from error

    async def evaluate(self, window: JSHandle, function: str) -> Any:
        """Call a JavaScript function with the window of a page, and return its value.

        Raises PageLostError, and BrowserLostError if chromium has ended too.
        """
        try:
            return await window.evaluate(function)
        except self._browser.errors as error:
            lost: tuple[type[Exception], ...] = (*self._browser.errors, asyncio.TimeoutError)
            try:
                await self._browser.check_answers()
            except lost:
                raise BrowserLostError(f"the browser does not go on: {error}") from error
            raise PageLostError(str(error)) from error

    async def observe(self) -> StepOutcome:
        """Read the page. Raises BrowserLostError."""
        return await self.perform([])

    async def _step(
        self, actions: Sequence[BrowserAction], after_each: Callable[[], Awaitable[bool]] | None
    ) -> StepOutcome:
        self.wants_image = False
        self.tab.begin_step()
        try:
            problem = await asyncio.wait_for(self._perform(actions, after_each), self._limits.step_seconds)
        except asyncio.TimeoutError:
            problem = await self._replace_page(
                f"the page did not answer within {self._limits.step_seconds:g} seconds and was closed"
            )
        if self.message is not None and not problem:
            return StepOutcome("", done=True)
        return await self._observe(problem)

    async def navigate(self, url: str, until: Literal["domcontentloaded", "load"] = "domcontentloaded") -> None:
        """Open an address in the active tab. Raises PageActionError."""
        page = self.tab.page
        try:
            await page.goto(url, wait_until=until, timeout=_NAVIGATION_SECONDS * 1000)
        except self._browser.errors as error:
            reason = str(error).splitlines()[0].partition(": ")[2]
            if "interrupted by another navigation" in reason or self.tab.crashed:
                await self.tab.settle()
                return
            if "Download is starting" in reason:
                raise PageActionError("the address is a download, which is refused") from None
            raise PageActionError(f"{url[:_URL_CHARACTERS]} cannot be opened: {_explain(reason)}") from None

    async def new_tab(self) -> None:
        """Open an empty tab and switch to it. Raises PageActionError if there are too many."""
        if len(self._tabs) >= self._limits.max_tabs:
            raise PageActionError(f"there are {len(self._tabs)} tabs already; close one first")
        await self._open_tab()
        self._active = len(self._tabs) - 1

    async def switch_tab(self, index: int) -> None:
        """Raises PageActionError."""
        self._active = self._check_index(index)
        await self.tab.page.bring_to_front()

    async def close_tab(self, index: int | None) -> None:
        """Close a tab, the active one by default. Raises PageActionError."""
        index = self._active if index is None else self._check_index(index)
        await self._tabs.pop(index).close()
        self._active = max(0, self._active - (index <= self._active and self._active > 0))
        if not self._tabs:
            await self.new_tab()

    @property
    def is_fresh(self) -> bool:
        """Whether it has one tab that works and holds no key down, for another episode on trusted pages."""
        tab = self.tab
        usable = not (tab.crashed or tab.may_hold_input or tab.page.is_closed())
        return len(self._tabs) == 1 and usable and self._browser.alive

    def reset(self) -> None:
        """Number elements anew, and forget what was said."""
        self._next_number, self.message = 1, None
        self.resets += 1
        self._notes.clear()
        self.tab.notes.clear()

    async def close(self) -> None:
        """Close the context with all of its pages."""
        for task in self._popups:
            task.cancel()
        await self._browser.close_context(self._context, self._proxy)

    async def _perform(self, actions: Sequence[BrowserAction], after_each: Callable[[], Awaitable[bool]] | None) -> str:
        """Why an action failed; empty if none did."""
        for action in actions:
            try:
                function, arguments = bind(action)
                await function(self, **arguments)
                await self.tab.settle()
            except (ActionSyntaxError, PageActionError, MissingElementError) as error:
                return str(error)
            except self._browser.errors as error:
                self._check_alive()
                self.tab.may_hold_input = True  # it may have failed halfway
                if not self.tab.crashed and not self.tab.page.is_closed():
                    return f"{action.name} failed: {str(error).splitlines()[0].partition(': ')[2][:200]}"
            if (after_each is not None and await after_each()) or self.message is not None:
                break
        return ""

    async def _observe(self, problem: str) -> StepOutcome:
        for _ in range(2):
            try:
                reading = self._read(problem)
                return await asyncio.wait_for(reading, min(self._limits.step_seconds, _READ_SECONDS))
            except asyncio.TimeoutError:
                problem = await self._replace_page("the page could not be read in time and was closed")
            except self._browser.errors as error:
                self._check_alive()
                if self.tab.crashed or self.tab.page.is_closed():
                    problem = await self._replace_page("")
                else:
                    problem = problem or f"the page could not be read: {str(error)[:200]}"
        return StepOutcome(f"Error: {problem}", error=True)

    async def _read(self, problem: str) -> StepOutcome:
        self._check_alive()
        if self.tab.crashed or self.tab.page.is_closed():
            problem = await self._replace_page(problem)
        tab = self.tab
        outline, self._next_number = await tab.reader.read(
            self._next_number, self._limits.max_characters, self._view.exclude
        )
        head = [f"Error: {problem}"] if problem else []
        notes = [*self._notes, *tab.notes]
        self._notes.clear()
        tab.notes.clear()
        head += [f"({note})" for note in notes]
        if self._view.shows_address:
            head.append(self._describe_address(outline.title))
        tail = [f"({outline.above} elements are above; scroll up to read them)"] if outline.above else []
        tail += ["(more follows; scroll down to read on)"] if outline.cut else []
        lines = outline.lines or ["(the page is empty)"]
        image = await tab.page.screenshot(type="png") if self.wants_image else None
        return StepOutcome("\n".join([*head, *lines, *tail]), image, error=bool(problem))

    def _describe_address(self, title: str) -> str:
        tabs = f"Tab {self._active} of {len(self._tabs)}: " if len(self._tabs) > 1 else ""
        return f"{tabs}{json.dumps(title, ensure_ascii=False)} {self.tab.page.url[:_URL_CHARACTERS]}"

    async def _replace_page(self, why: str) -> str:
        """Put an empty tab in place of one that has crashed or hangs. Returns what the model reads."""
        tab = self.tab
        if tab.crashed:
            why = f"the page crashed, or took more than {self._browser.page_limits}, and was closed"
        elif tab.page.is_closed() and not why:
            why = "the page was closed"
        self._notes += tab.notes
        await tab.close()
        self._check_alive()
        try:
            await asyncio.wait_for(self._open_tab(replaces=True), _READ_SECONDS)
        except asyncio.TimeoutError:
            raise BrowserLostError(f"the browser opened no tab within {_READ_SECONDS:g} seconds") from None
        return why

    def _check_alive(self) -> None:
        if not self._browser.alive:
            raise BrowserLostError("the browser has ended; the trajectory's pages are lost with it")

    def _check_index(self, index: int) -> int:
        if not 0 <= index < len(self._tabs):
            raise PageActionError(f"there is no tab {index}; the last one is {len(self._tabs) - 1}")
        return index

    async def _open_tab(self, replaces: bool = False) -> None:
        """Open an empty tab, the last one or in place of the active one."""
        async with self._opening:
            tab = await self._attach(await self._context.new_page())
            if replaces:
                self._tabs[self._active] = tab
            else:
                self._tabs.append(tab)

    async def _attach(self, page: Page) -> Tab:
        tab = await Tab.open(page)
        page.on("close", lambda _: self._forget(tab))
        return tab

    def _forget(self, tab: Tab) -> None:
        """A page that has closed itself, in the background, is no tab any more."""
        if tab in self._tabs and tab is not self.tab:
            index = self._tabs.index(tab)
            del self._tabs[index]
            self._active -= index < self._active

    def _take_popup(self, page: Page) -> None:
        task = asyncio.create_task(self._open_popup(page))
        self._popups.add(task)
        task.add_done_callback(self._popups.discard)

    async def _open_popup(self, page: Page) -> None:
        try:
            async with self._opening:
                if any(each.page is page for each in self._tabs):
                    return
                if len(self._tabs) >= self._limits.max_tabs:
                    await page.close()
                    self._note_once("the page opened more tabs than are allowed, which were closed")
                    return
                self._tabs.append(await self._attach(page))
                self._note_once(f"the page opened tab {len(self._tabs) - 1}; switch to it with tab_focus")
        except self._browser.errors:
            return  # closed already

    def _note_once(self, note: str) -> None:
        if note not in self._notes and len(self._notes) < self._limits.max_tabs:
            self._notes.append(note)


def _explain(reason: str) -> str:
    """What chromium says, and what it may mean."""
    words = reason.partition(" at ")[0]
    if "ERR_TUNNEL_CONNECTION_FAILED" in words:
        return f"{words} (the host is not among the allowed ones, or cannot be reached)"
    return words[:200]
