"""MiniWoB++: small tasks on web pages, of the package ``miniwob`` (MIT), in a browser.

    python -m verl_tool.environments rows miniwob click-test-2,click-color --output data/train.parquet

A row's arguments are ``page``, such as ``click-test-2``, and ``seed``. Each turn is an action of the browser, and the
episode ends with the page's verdict, its ``raw_reward`` from -1 to 1; one that does not end gets -1. The pages are
served from the package's folder; nothing else is reached, and the model runs no script, so that it cannot set the
reward.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import Field

from verl_tool.browser.action_syntax import ActionSyntaxError, BrowserAction, parse_actions, parse_arguments
from verl_tool.browser.actions import bind
from verl_tool.browser.browser_session import (
    BrowserLimits,
    BrowserLostError,
    BrowserSession,
    PageLostError,
    PageView,
)
from verl_tool.browser.chromium import BrowserSettings, Chromium
from verl_tool.browser.tab import PageActionError, Tab
from verl_tool.environments.environment_tool import Environment
from verl_tool.errors import StartError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.scan import remove_thoughts
from verl_tool.protocol import FaultKind, Opening, Role, ToolDescription
from verl_tool.sandbox.isolation.levels import Level
from verl_tool.servers.tools.base import ToolOptions, ToolResult
from verl_tool.verification import ENVIRONMENT_STYLE, Verdict

if TYPE_CHECKING:
    from playwright.async_api import JSHandle

TOOL = "browser"
SYSTEM = 'You act on a web page. Answer with one action, such as click(1) or fill(2, "text").'
_PAGES = re.compile(r"[a-z0-9-]{1,64}")
_NOT_READ = "#query, #reward-display, #sync-task-cover, #click-canvas"
"""The instruction, which the model reads as such, and what the pages show to people."""
_NOT_PLAYED = (
    *("goto", "go_back", "go_forward", "new_tab", "tab_close", "tab_focus", "screenshot", "upload_file"),
    *("send_msg_to_user", "report_infeasible"),
)
_BEGIN_SECONDS = 60.0
_READY_SECONDS = 2.0
_LOST_REWARD = -1.0
"""Of an episode that did not end, as by MiniWoB's own clock, and of one whose page hangs, crashes or was left: what is
played on it makes it do so, or a machine too slow for the deadlines."""
_MAX_EPISODES = 50
"""Of a context, whose process may take so much time (`PageMonitor`) and memory in all."""
_MAX_IDLE = 16
"""Contexts that wait for another episode."""
_FENCE = re.compile(r"```[a-z]*\s(.*?)```|<browser>(.*?)(?:</browser>|$)", re.DOTALL)

_BEGIN = """(seed) => {
  core.EPISODE_MAX_TIME = 2 ** 31 - 1;
  Math.seedrandom(seed);
  core.startEpisodeReal();
  core.startEpisodeReal = () => {};
}"""
"""Begins the only episode: a click on the cover that the page lays over a task's end would begin another one."""
_INSTRUCTION = "() => WOB_TASK_READY ? String(core.getUtterance().utterance ?? core.getUtterance()) : null"
_RESULT = "(page) => page.WOB_EPISODE_ID > 0 || page.WOB_DONE_GLOBAL ? page.WOB_RAW_REWARD_GLOBAL : null"


class MiniWobOptions(ToolOptions):
    """Limits of one episode, and where the pages are."""

    timeout_seconds: float = Field(default=20.0, gt=0)
    """Of one turn."""
    max_output_length: int = Field(default=4000, ge=200)
    """Characters of an observation."""
    max_contexts: int = Field(default=64, ge=1)
    """Episodes at once in each replica."""
    describe_actions: bool = True
    """Describe the browser's actions in the prompt, as a tool."""
    folder: Path | None = None
    """Of the pages, with ``miniwob`` and ``core`` in it; None: the one of the package."""
    isolation: str = Level.full.name
    executable: Path | None = None
    """Of chromium; None: the one of the system."""


@dataclass
class MiniWobSession:
    """One episode."""

    browser: BrowserSession
    page: JSHandle
    """The page's window, which no page that follows it shares."""
    tab: Tab
    """The tab it is in."""
    results: list[float] = field(default_factory=list)
    """The reward, once the page has given it."""
    is_lost: bool = False
    """Whether the page was lost before it gave one."""


class MiniWobEnvironment(Environment):
    """Episodes on one chromium. Contexts are used again: all pages are the package's."""

    name = "miniwob"
    description = "Small tasks on web pages."
    Options = MiniWobOptions
    options: MiniWobOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        chosen = self.options
        self.max_live = chosen.max_contexts  # type: ignore[misc]
        self._limits = BrowserLimits(chosen.timeout_seconds, chosen.max_output_length, 1, 1024, 400, 400)
        self._settings = BrowserSettings(chosen.executable, chosen.isolation)
        self._chromium: Chromium | None = None
        self._runner: web.AppRunner | None = None
        self._host = ""
        self._idle: list[BrowserSession] = []
        self._starting = asyncio.Lock()

    def isolation_in_force(self) -> str:
        return "" if self._chromium is None else self._chromium.describe_isolation()

    async def start(self) -> None:
        """Raises StartError if the pages, Playwright or chromium are missing."""
        app = web.Application()
        app.router.add_static("/", pages_folder(self.options.folder))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._host = f"127.0.0.1:{self._runner.addresses[0][1]}"
        await self._running_chromium()

    async def close(self) -> None:
        if self._chromium is not None:
            await self._chromium.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[MiniWobSession, Opening]:
        page, seed = arguments.get("page"), arguments.get("seed", 0)
        if not isinstance(page, str) or not _PAGES.fullmatch(page) or type(seed) is not int:
            words = f"the row's page is {page!r:.80} and its seed {seed!r:.40}; give a page's name and a whole number"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        folder = pages_folder(self.options.folder)
        if not (folder / "miniwob" / f"{page}.html").is_file():
            raise ToolFault(FaultKind.MISCONFIGURED, f"miniwob has no page {page!r}", retryable=False)
        try:
            return await asyncio.wait_for(self._begin(page, seed), _BEGIN_SECONDS)
        except (BrowserLostError, PageActionError, asyncio.TimeoutError) as error:
            raise ToolFault(FaultKind.SANDBOX, f"{page} does not begin: {error or 'time is up'}", True) from error

    async def step(self, session: MiniWobSession, call: Call) -> ToolResult:
        role: Role = "user" if call.arguments is None else "tool"
        try:
            actions = actions_of(call)
        except ActionSyntaxError as error:
            return ToolResult(f"Error: {error}", valid=False, invalid_reason=str(error), role=role)

        try:
            outcome = await session.browser.perform(actions, lambda: self._look(session))
        except BrowserLostError as error:
            raise ToolFault(FaultKind.STATE_LOST, str(error), retryable=False) from error
        if not session.results and session.browser.tab is not session.tab:
            session.results.append(_LOST_REWARD)
        if not session.results and outcome.error:  # `perform` looks after actions that succeed only
            await self._look_again(session)
        if session.results:
            return ToolResult("The task is over.", done=True, reward=session.results[0], role=role)
        return ToolResult(outcome.text, error=outcome.error, role=role)

    async def verdict(
        self, session: MiniWobSession, text: str, data: Mapping[str, Any], rewards: list[float]
    ) -> Verdict:
        if not session.results:  # the page may have ended by its own clock since the last action
            await self._look_again(session)
        if session.results:
            return Verdict(session.results[0], numbers={} if session.is_lost else {"env_done": 1.0})
        return Verdict(_LOST_REWARD)

    async def _look(self, session: MiniWobSession) -> bool:
        """Read the page's result and return whether there is one."""
        try:
            reward = await session.browser.evaluate(session.page, _RESULT)
        except PageLostError:
            reward, session.is_lost = _LOST_REWARD, True
        if reward is not None:
            session.results.append(float(reward))
        return reward is not None

    async def _look_again(self, session: MiniWobSession) -> None:
        """Read the page's result with the deadline of a turn. Raises ToolFault."""
        try:
            await asyncio.wait_for(self._look(session), self.options.timeout_seconds)
        except asyncio.TimeoutError:
            session.results.append(_LOST_REWARD)
            session.is_lost = True
        except BrowserLostError as error:
            raise ToolFault(FaultKind.STATE_LOST, str(error), retryable=False) from error

    async def end(self, session: MiniWobSession) -> None:
        browser = session.browser
        if browser.is_fresh and browser.resets < _MAX_EPISODES and len(self._idle) < _MAX_IDLE:
            self._idle.append(browser)
        else:
            await browser.close()

    async def _begin(self, page: str, seed: int) -> tuple[MiniWobSession, Opening]:
        browser = await self._browser()
        try:
            return await self._open(browser, page, seed)
        except BaseException:
            await browser.close()
            raise

    async def _open(self, browser: BrowserSession, page: str, seed: int) -> tuple[MiniWobSession, Opening]:
        await browser.navigate(f"http://{self._host}/miniwob/{page}.html", "load")
        tab = browser.tab
        page_window = await tab.page.evaluate_handle("window")
        await tab.page.evaluate(_BEGIN, str(seed))
        instruction = None
        for _ in range(40):
            instruction = await tab.page.evaluate(_INSTRUCTION)
            if instruction is not None:
                break
            await asyncio.sleep(_READY_SECONDS / 40)
        if instruction is None:
            raise BrowserLostError("the page does not become ready")
        browser.reset()
        shown = await browser.observe()
        if browser.tab is not tab:
            raise BrowserLostError("the page cannot be read")
        tools = [_description()] if self.options.describe_actions else []
        question = {"role": "user", "content": f"{' '.join(instruction.split())}\n\n{shown.text}"}
        return MiniWobSession(browser, page_window, tab), Opening(messages=[question], tools=tools, every_turn=True)

    async def _browser(self) -> BrowserSession:
        chromium = await self._running_chromium()
        while self._idle:
            browser = self._idle.pop()
            if browser.is_fresh:
                return browser
            await browser.close()
        return await BrowserSession.open(chromium, [self._host], self._limits, PageView(_NOT_READ, False))

    async def _running_chromium(self) -> Chromium:
        """The browser, another one if it has crashed."""
        async with self._starting:
            if self._chromium is not None and not self._chromium.alive:
                crashed, self._chromium = self._chromium, None
                self._idle.clear()
                await crashed.close()
            if self._chromium is None:
                chromium = Chromium(self._settings)
                await chromium.start()
                self._chromium = chromium
            return self._chromium


def read_rows(source: str, count: int = 1000, first_seed: int = 0, system: str = SYSTEM) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of the pages in `source`, separated by commas, with seeds from `first_seed` on. An empty
    `system` leaves the system message to the model's template."""
    pages = [page.strip() for page in source.split(",") if page.strip()]
    prompt = [{"role": "system", "content": system}] if system else []
    for number in range(count if pages else 0):
        environment = {"name": MiniWobEnvironment.name, "page": pages[number % len(pages)], "seed": first_seed + number}
        yield {
            "data_source": f"miniwob/{environment['page']}",
            "prompt": prompt,
            "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": "{}"},
            "extra_info": {"index": number, "tools_kwargs": {"environment": environment}},
        }


def pages_folder(folder: Path | None) -> Path:
    """Return the folder of the pages. Raises StartError that says how to get them."""
    if folder is None:
        package = importlib.util.find_spec("miniwob")
        if package is None or not package.submodule_search_locations:
            raise StartError(
                "environment miniwob: the package is not installed; pip install --no-deps miniwob, or give the option "
                "folder"
            )
        folder = Path(package.submodule_search_locations[0]) / "html"
    if not (folder / "core" / "core.js").is_file():
        raise StartError(f"environment miniwob: {folder} has no core/core.js; give the folder html of the package")
    return folder


def action_text(turn: str) -> str:
    """Return the action in a turn: outside thoughts, and in a fence or tags if there are any."""
    turn = remove_thoughts(turn)
    found = _FENCE.search(turn)
    return (found[1] or found[2] or "") if found else turn


def actions_of(call: Call) -> list[BrowserAction]:
    """Return the actions of a turn or call. Raises ActionSyntaxError for what is no action, or leaves the page."""
    text = call.arguments is None
    actions = parse_actions(action_text(call.input)) if text else parse_arguments(call.arguments or {})
    for action in actions:
        function, _ = bind(action)
        if function.__name__ in _NOT_PLAYED:
            raise ActionSyntaxError(f"{action.name} is no action here; act on the elements of the page")
    return actions


def _description() -> ToolDescription:
    return ToolDescription(
        name=TOOL,
        description=(
            "Acts on the page, whose elements are numbered: click(id), fill(id, text), type(id, text), "
            "press(id, key), select_option(id, option), hover(id), focus(id), drag_and_drop(id, id), scroll(x, y), "
            "mouse_click(x, y), noop(ms)."
        ),
        parameters={
            "type": "object",
            "properties": {"action": {"type": "string", "description": 'such as click("12")'}},
            "required": ["action"],
        },
    )
