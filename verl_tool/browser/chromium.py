"""One chromium, driven by Playwright, with a context for each trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tool.browser.egress_router import ContextProxy, EgressRouter
from verl_tool.browser.isolation import (
    PROXY_PORT,
    Confinement,
    find_chromium,
    require_confinement,
    write_launcher,
)
from verl_tool.browser.page_monitor import PageLimits, PageMonitor
from verl_tool.errors import StartError
from verl_tool.sandbox.isolation.levels import Level

if TYPE_CHECKING:
    from playwright.async_api import Browser as PlaywrightBrowser
    from playwright.async_api import BrowserContext, Playwright

_START_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
_ARGUMENTS = (
    # One process a tab: what a page takes is bounded by its process, and contexts never share one.
    *("--disable-site-isolation-trials", "--disable-features=IsolateOrigins,site-per-process,Translate,MediaRouter"),
    # Roles and names of elements, for `outline.js`.
    "--enable-blink-features=ComputedAccessibilityInfo",
    # Everything goes through the proxy, the loopback device too, and nothing is looked up but by the proxy.
    *("--proxy-bypass-list=<-loopback>", "--disable-quic", "--force-webrtc-ip-handling-policy=disable_non_proxied_udp"),
    *("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.*", "--dns-prefetch-disable"),
    # Contexts share one clipboard. The first four settings are Playwright's, which these take the place of.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4,"
    "middleClickPasteAllowed=false",
    *("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-domain-reliability", "--no-pings", "--mute-audio", "--disable-breakpad", "--disable-file-system"),
)


@dataclass(frozen=True)
class BrowserSettings:
    """What a browser is started with."""

    executable: Path | None = None
    """Of chromium; None: the one of the system."""
    isolation: str = Level.full.name
    max_page_mb: int = 512
    """Of one tab's process, megabytes of 2**20 bytes."""
    max_browser_mb: int = 8192
    """Of all of chromium's processes."""
    max_page_cpu_seconds: int = 300
    """Of one tab's process."""


class Chromium:
    """One chromium. `start` it, and `close` it; it is not started again."""

    def __init__(self, settings: BrowserSettings) -> None:
        self._settings = settings
        self._driver: Playwright | None = None
        self._chromium: PlaywrightBrowser | None = None
        self._egress: EgressRouter | None = None
        self._monitor: PageMonitor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._confinement = Confinement(Level.none)
        self._own_sandbox = False
        self.page_limits = f"{settings.max_page_mb} MB of memory or {settings.max_page_cpu_seconds} seconds of CPU time"
        """What ends a page, for the model."""
        self.errors: tuple[type[Exception], ...] = ()
        """The driver's exceptions."""

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self._chromium is not None and self._chromium.is_connected()

    async def check_answers(self) -> None:
        """Raise one of `errors`, or asyncio.TimeoutError, if it has ended or does not answer."""
        assert self._chromium is not None
        session = await asyncio.wait_for(self._chromium.new_browser_cdp_session(), _ANSWER_SECONDS)
        await asyncio.wait_for(session.detach(), _ANSWER_SECONDS)

    @property
    def monitor(self) -> PageMonitor:
        """What watches its processes."""
        assert self._monitor is not None
        return self._monitor

    def describe_isolation(self) -> str:
        """Describe in words how pages are confined."""
        own = "chromium's sandbox (namespaces, seccomp)" if self._own_sandbox else "chromium's sandbox is off"
        if self._confinement.level is Level.full:
            return f"full: bubblewrap, no network but a proxy, no files of the host, not root; {own}"
        return f"none: chromium runs as the server does ({self._confinement.missing}); {own}"

    async def start(self) -> None:
        """Start chromium. Raises StartError or IsolationError with what to do."""
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError as error:
            raise StartError(
                f"tool browser needs playwright ({error}); install the extra: pip install 'verl-tool[browser]'"
            ) from error
        self.errors = (Error,)
        chromium = find_chromium(self._settings.executable)
        self._confinement = await asyncio.to_thread(require_confinement, self._settings.isolation)
        self._folder = Path(tempfile.mkdtemp(prefix="verl-tool-browser-"))
        try:
            self._driver = await asyncio.wait_for(async_playwright().start(), _START_SECONDS)
            await self._start_sandboxed(chromium)
        except BaseException:
            await self.close()
            raise

    async def open_context(
        self, hosts: Sequence[str], max_bytes: int, width: int, height: int
    ) -> tuple[BrowserContext, ContextProxy]:
        """Open a context that reaches `hosts` only. Raises ConfigError for a host that is none."""
        assert self._chromium is not None
        assert self._egress is not None
        proxy = await self._egress.open(hosts, max_bytes)
        try:
            context = await self._chromium.new_context(
                proxy={"server": f"http://{proxy.host}:{proxy.port}", "bypass": "<-loopback>"},
                viewport={"width": width, "height": height},
                accept_downloads=False,
                service_workers="block",
                permissions=[],
            )
        except BaseException:
            await self._egress.remove(proxy)
            raise
        return context, proxy

    async def close_context(self, context: BrowserContext, proxy: ContextProxy) -> None:
        """Close a context with all of its pages."""
        assert self._egress is not None
        await self._egress.remove(proxy)
        with contextlib.suppress(Exception):  # a browser that has crashed closes nothing
            await asyncio.wait_for(context.close(), _CLOSE_SECONDS)

    async def close(self) -> None:
        """End chromium and its driver."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for closing in (self._chromium and self._chromium.close(), self._driver and self._driver.stop()):
            if closing:
                with contextlib.suppress(Exception):  # either may have crashed
                    await asyncio.wait_for(closing, _CLOSE_SECONDS)
        if self._egress is not None:
            await self._egress.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start_sandboxed(self, chromium: Path) -> None:
        """Start it with its own sandbox, and without where that cannot be."""
        root = os.geteuid() == 0 and self._confinement.level is Level.none
        expected: tuple[type[Exception], ...] = (*self.errors, OSError, asyncio.TimeoutError)
        problems = []
        for own in (False,) if root else (True, False):
            try:
                await asyncio.wait_for(self._launch(chromium, own), _START_SECONDS)
                self._own_sandbox = own
                return
            except expected as error:
                problems.append(str(error) or type(error).__name__)
        raise StartError(f"tool browser: {chromium} does not start: {problems[-1][-1500:]}")

    async def _launch(self, chromium: Path, own_sandbox: bool) -> None:
        assert self._driver is not None
        assert self._folder is not None
        control = self._folder / f"control-{int(own_sandbox)}"
        limit = 2 * self._settings.max_page_mb + 2048
        script = write_launcher(self._folder, control, chromium, self._confinement, limit)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(control))
            server.listen(1)
            server.setblocking(False)
            received = asyncio.create_task(_receive_listener(server))
            try:
                self._chromium = await self._driver.chromium.launch(
                    executable_path=script,
                    chromium_sandbox=own_sandbox,
                    args=list(_ARGUMENTS),
                    env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                    timeout=_START_SECONDS * 1000,
                )
                pid, listener = await received
            finally:
                received.cancel()
                control.unlink(missing_ok=True)
        self._egress = EgressRouter(listener, PROXY_PORT)
        chosen = self._settings
        limits = PageLimits(chosen.max_page_mb << 20, chosen.max_browser_mb << 20, chosen.max_page_cpu_seconds)
        self._monitor = PageMonitor(pid, limits)
        self._watching = asyncio.create_task(self._monitor.watch())


async def _receive_listener(server: socket.socket) -> tuple[int, socket.socket | None]:
    """The process that becomes chromium, and its socket for the proxy."""
    loop = asyncio.get_running_loop()
    client, _ = await loop.sock_accept(server)
    with client:
        client.setblocking(True)
        client.settimeout(_START_SECONDS)
        words = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, client, 64, 1)
        client.send(b".")
    return struct.unpack("3i", words)[0], socket.socket(fileno=descriptors[0]) if descriptors else None
