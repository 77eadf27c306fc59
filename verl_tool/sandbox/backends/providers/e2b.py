"""Sandboxes of E2B (https://e2b.dev/docs), by its package ``e2b``. A key is in E2B_API_KEY. Read: e2b 2.63.0.

An *image* is the name of a template there, which also has the CPUs and the memory.
"""

from __future__ import annotations

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


class E2BProvider(RemoteProvider):
    """See `ContainerProvider`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        super().__init__("e2b", parse_settings(RemoteSettings, "e2b", settings))
        self._e2b = e2b = import_sdk("e2b")
        self._final: tuple[type[Exception], ...] = (
            *(e2b.AuthenticationException, e2b.InvalidArgumentException),
            *(e2b.NotFoundException, e2b.TemplateException),
        )

    async def start(self, spec: ContainerSpec) -> E2BProcess:
        self.check(spec)
        creating = self._e2b.AsyncSandbox.create(
            template=spec.settings.image,
            timeout=LEASE_SECONDS,
            metadata={"name": spec.name, "verl-tool-owner": owner()},
            allow_internet_access=False,
        )
        try:
            sandbox = await finish_creation(creating, lambda created: created.kill())
        except Exception as error:  # its errors have no class of their own
            raise self.failure("create", error, self._final) from error
        process = E2BProcess(sandbox)
        try:
            command = shlex.join(["sh", *images_runtime(spec.folders).command])
            await process.run(f"exec {command}", user="root")
        except BaseException as error:
            await process.end()
            if isinstance(error, Exception):
                raise self.failure("run", error, self._final) from error
            raise
        process.begin()
        return process


class E2BProcess(RelayedProcess):
    """A command of a sandbox. Its output comes as text."""

    lines = True

    def __init__(self, sandbox: Any) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._command: Any = None

    async def run(self, command: str, user: str | None) -> None:
        self._command = await self._sandbox.commands.run(
            command,
            background=True,
            user=user,
            cwd="/",
            stdin=True,
            timeout=0,
            on_stdout=lambda text: self.stdout.feed_data(text.encode()),
            on_stderr=lambda text: self.stderr.feed_data(text.encode()),
            retain_output=False,
        )

    async def send(self, data: bytes) -> None:
        await self._command.send_stdin(data)

    async def watch(self) -> None:
        await self._command.wait()

    async def renew(self) -> None:
        await self._sandbox.set_timeout(LEASE_SECONDS)

    async def remove(self) -> None:
        await self._sandbox.kill()
