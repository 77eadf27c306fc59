"""Sandboxes of Daytona (https://www.daytona.io/docs), by its package ``daytona``.

A key is in DAYTONA_API_KEY. Read: daytona 0.226.1. Of what its sandboxes pass on, only a terminal carries bytes both
ways: the resident runs on one, without its line discipline.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Mapping
from typing import Any

from verl_tool.sandbox.backends.providers.orphans import owner
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec
from verl_tool.sandbox.backends.providers.relayed import RelayedProcess
from verl_tool.sandbox.backends.providers.remote import (
    LEASE_SECONDS,
    RemoteProvider,
    RemoteSettings,
    finish_creation,
    import_sdk,
    parse_settings,
)
from verl_tool.sandbox.backends.providers.runtime import images_runtime

_BEGIN = b"verl-tool:begin\n"
"""Printed when the terminal is raw. What came before is of the shell."""
_RAW = "command -v python3 || exit 127; stty raw -echo || exit; printf '%s:begin\\n' verl-tool; exec {}\n"
"""The line as it is echoed does not have the word."""


class DaytonaSettings(RemoteSettings):
    target: str | None = None
    """The region."""
    disk_gb: int | None = None
    """Of a sandbox. Defaults to the service's own number."""


class DaytonaProvider(RemoteProvider):
    """See `ContainerProvider`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        self.settings = parse_settings(DaytonaSettings, "daytona", settings)
        super().__init__("daytona", self.settings)
        self._daytona = daytona = import_sdk("daytona")
        self._final = (daytona.DaytonaAuthenticationError, daytona.DaytonaNotFoundError, daytona.DaytonaBadRequestError)

    async def start(self, spec: ContainerSpec) -> DaytonaProcess:
        self.check(spec)
        try:
            client = self._daytona.AsyncDaytona()
        except self._daytona.DaytonaError as error:
            raise self.failure("client", error, (self._daytona.DaytonaError,)) from error
        process = DaytonaProcess(client)
        try:
            create = client.create(self._parameters(spec), timeout=self.settings.start_seconds)
            process.sandbox = await finish_creation(create, lambda created: created.delete())
            await process.run(shlex.join(["sh", *images_runtime(spec.folders).command]))
        except BaseException as error:
            await process.end()
            if isinstance(error, (self._daytona.DaytonaError, OSError, asyncio.TimeoutError)):
                raise self.failure("create", error, self._final) from error
            raise
        process.begin()
        return process

    def _parameters(self, spec: ContainerSpec) -> Any:
        memory = math.ceil(spec.limits.memory_bytes / (1 << 30))
        resources = self._daytona.Resources(
            cpu=math.ceil(spec.settings.cpus), memory=memory, disk=self.settings.disk_gb
        )
        return self._daytona.CreateSandboxFromImageParams(
            image=spec.settings.image,
            resources=resources,
            name=spec.name,
            os_user="root",
            labels={"verl-tool-owner": owner()},
            network_block_all=True,
            auto_stop_interval=LEASE_SECONDS // 60,
            ttl_minutes=math.ceil(spec.settings.max_seconds / 60),
            ephemeral=True,
            target=self.settings.target,
        )


class DaytonaProcess(RelayedProcess):
    """A terminal of a sandbox."""

    lines = True

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client
        self.sandbox: Any = None
        self._terminal: Any = None
        self._before: bytearray | None = bytearray()
        """What the terminal has printed, until the resident is about to start."""

    async def run(self, command: str) -> None:
        self._terminal = await self.sandbox.process.create_pty_session("verl-tool", self._receive, cwd="/")
        await self._terminal.send_input(_RAW.format(command))

    def _receive(self, data: bytes) -> None:
        if self._before is None:
            self.stdout.feed_data(data)
            return
        self._before += data
        printed, begun, output = self._before.partition(_BEGIN)
        if begun:
            self.stderr.feed_data(bytes(printed))
            self._before = None
            self.stdout.feed_data(bytes(output))

    async def send(self, data: bytes) -> None:
        while self._before is not None and not self._ended.is_set():  # a shell would read it  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await self._terminal.send_input(data)

    async def watch(self) -> None:
        ended = await self._terminal.wait()
        if self._before is not None:
            self.stderr.feed_data(bytes(self._before))
        if ended.error:
            self.stderr.feed_data(f"{ended.error}\n".encode())

    async def renew(self) -> None:
        await self.sandbox.refresh_activity()

    async def remove(self) -> None:
        try:
            if self._terminal is not None:
                await self._terminal.disconnect()
            if self.sandbox is not None:
                await self.sandbox.delete()
        finally:
            await self._client.close()
