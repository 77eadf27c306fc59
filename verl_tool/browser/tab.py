"""One tab of a context: its page, what happens to it, and its elements."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from typing import TYPE_CHECKING, Any

from verl_tool.browser.page_reader import FoundElement, PageReader

if TYPE_CHECKING:
    from playwright.async_api import CDPSession, Dialog, Download, Page

MAX_DIALOGS = 20
"""Of one step; a page that opens more is closed."""
MAX_NOTES = 6
_NOTE_CHARACTERS = 200
_GRACE_SECONDS = 0.03
"""How long a page has to begin what an action makes it do."""
_LOAD_SECONDS = 5.0
_CLOSE_SECONDS = 5.0

_LOCATE = """function(enabled) {
  if (!this.isConnected) return {problem: "is no longer on the page"};
  if (enabled && (this.disabled || this.getAttribute("aria-disabled") === "true")) return {problem: "is disabled"};
  this.scrollIntoViewIfNeeded(true);
  const rect = [...this.getClientRects()].find((each) => each.width > 0 && each.height > 0);
  if (!rect) return {problem: "is not visible"};
  const clip = (low, high, end, part) => Math.max(low, 0) + (Math.min(high, end) - Math.max(low, 0)) * part;
  const at = ([across, down]) =>
    [clip(rect.left, rect.right, innerWidth, across), clip(rect.top, rect.bottom, innerHeight, down)];
  const hitAt = ([x, y]) => this.getRootNode().elementFromPoint(x, y);
  const isSame = (hit) => !hit || hit === this || this.contains(hit) || hit.contains(this) ||
    hit.closest("label")?.control === this;
  // The middle, or where else another element leaves it free.
  const parts = [0.5, 0.1, 0.9];
  const points = parts.flatMap((across) => parts.map((down) => [across, down]));
  const [x, y] = at(points.find((each) => isSame(hitAt(at(each)))) ?? points[0]);
  const hit = hitAt([x, y]);
  if (enabled && !isSame(hit)) {
    const ids = globalThis.verlToolOutline.ids;
    let over = hit;
    while (over && !ids.has(over)) over = over.parentElement;
    return {problem: "is covered by " + (over ? `[${ids.get(over)}]` : "another element")};
  }
  return {x, y};
}"""


class PageActionError(Exception):
    """The page does not do it. The message is for the model."""


class Tab:
    """A page, with what it tried to do since it was last read."""

    def __init__(self, page: Page, cdp: CDPSession) -> None:
        self.page = page
        self.reader = PageReader(cdp)
        self.notes: deque[str] = deque(maxlen=MAX_NOTES)
        """What the model should know: dialogs, downloads, a crash."""
        self.crashed = False
        self.modifiers: set[str] = set()
        """Those of Control and Shift that are down, or may be."""
        self.may_hold_input = False
        """Whether a key or button may be down, for whoever uses the page next."""
        self._cdp = cdp
        self._loading: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dialogs = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, page: Page) -> Tab:
        """Attach to a page."""
        tab = cls(page, await page.context.new_cdp_session(page))
        page.on("crash", lambda _: tab._crash())
        page.on("dialog", tab._dismiss)
        page.on("download", tab._cancel_download)
        for event in ("frameStartedLoading", "frameStoppedLoading"):
            tab._cdp.on(f"Page.{event}", tab._load if event.startswith("frameStarted") else tab._stop)
        await tab._cdp.send("Page.enable")
        await tab.reader.start()
        return tab

    async def settle(self, wait_seconds: float = _GRACE_SECONDS) -> None:
        """Wait for what an action has made the page do, a navigation above all."""
        await asyncio.sleep(wait_seconds)
        try:
            await asyncio.wait_for(self._idle.wait(), _LOAD_SECONDS)
        except asyncio.TimeoutError:
            # What still loads is not waited for again.
            self._loading.clear()
            self._idle.set()

    async def locate(self, number: int, enabled: bool = True) -> tuple[float, float]:
        """Scroll an element into the window, and return its middle, pixels. Raises PageActionError and
        MissingElementError."""
        element = await self.reader.find(number)
        found = await self.reader.call(element, _LOCATE, enabled)
        if "problem" in found:
            raise PageActionError(f"element [{number}] {found['problem']}")
        left, top = await self.reader.offset(element)
        return found["x"] + left, found["y"] + top

    async def call(self, number: int, function: str, *arguments: object) -> Any:
        """Call a JavaScript function with an element as ``this``. A text that it returns is why it cannot be: raises
        PageActionError, and MissingElementError."""
        element: FoundElement = await self.reader.find(number)
        problem = await self.reader.call(element, function, *arguments)
        if isinstance(problem, str):
            raise PageActionError(f"element [{number}] {problem}")
        return problem

    def begin_step(self) -> None:
        """Count dialogs anew."""
        self._dialogs = 0

    def note(self, text: str) -> None:
        """Add a note for the next observation."""
        plain = " ".join(text.split())
        short = plain if len(plain) <= _NOTE_CHARACTERS else f"{plain[:_NOTE_CHARACTERS]}…"
        if short not in self.notes:
            self.notes.append(short)

    async def close(self) -> None:
        """Close the page, whatever its scripts do."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):  # it has crashed, or the browser has
            await asyncio.wait_for(self.page.close(run_before_unload=False), _CLOSE_SECONDS)

    def _crash(self) -> None:
        self.crashed = True
        self._idle.set()

    def _load(self, event: dict[str, str]) -> None:
        self._loading.add(event["frameId"])
        self._idle.clear()

    def _stop(self, event: dict[str, str]) -> None:
        self._loading.discard(event["frameId"])
        if not self._loading:
            self._idle.set()

    async def _dismiss(self, dialog: Dialog) -> None:
        self._dialogs += 1
        leaves = dialog.type in ("alert", "beforeunload")
        if dialog.type != "beforeunload":
            message = dialog.message[:_NOTE_CHARACTERS]
            self.note(f"the page opened the {dialog.type} {json.dumps(message, ensure_ascii=False)}, which was closed")
        if self._dialogs == MAX_DIALOGS:
            self.note(f"the page opened {MAX_DIALOGS} dialogs and was closed")
            task = asyncio.create_task(self.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(Exception):  # the page is closed meanwhile
            await (dialog.accept() if leaves else dialog.dismiss())

    async def _cancel_download(self, download: Download) -> None:
        self.note("the page offered a download, which was refused")
        with contextlib.suppress(Exception):  # as above
            await download.cancel()
