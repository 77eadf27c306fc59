"""Sandboxes of Modal (https://modal.com/docs/guide/sandboxes), by its package ``modal``.

A token is in MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or in ``~/.modal.toml``. Read: modal 1.6.4.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from verl_tool.sandbox.backends.inside import resident
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

_LEASE = resident.encode({"id": 0, "op": "lease", "seconds": LEASE_SECONDS}, b"", False)


class ModalSettings(RemoteSettings):
    app: str = Field(default="verl-tool", min_length=1)
    """Of the account, in which sandboxes are listed. It is made if it is not there."""
    add_python: str | None = None
    """A version, such as ``3.12``, that is added to images without python3."""
    region: str | None = None


class ModalProvider(RemoteProvider):
    """See `ContainerProvider`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        self.settings = parse_settings(ModalSettings, "modal", settings)
        super().__init__("modal", self.settings)
        self._modal = modal = import_sdk("modal")
        errors = modal.exception
        # An image that cannot be built or found, wrong arguments, and what the account may not do.
        self._final: tuple[type[Exception], ...] = (
            *(errors.AuthError, errors.PermissionDeniedError, errors.NotFoundError),
            *(errors.InvalidError, errors.RemoteError, errors.UnimplementedError),
        )

    async def start(self, spec: ContainerSpec) -> ModalProcess:
        self.check(spec)
        try:
            sandbox = await finish_creation(self._create(spec), lambda created: created.terminate.aio())
        except (self._modal.exception.Error, OSError, asyncio.TimeoutError) as error:
            raise self.failure("create", error, self._final) from error
        try:
            command = ("sh", *images_runtime(spec.folders).command)
            process = ModalProcess(sandbox, await sandbox.exec.aio(*command, text=False, workdir="/"))
        except BaseException as error:
            await sandbox.terminate.aio()
            if isinstance(error, (self._modal.exception.Error, OSError, asyncio.TimeoutError)):
                raise self.failure("exec", error) from error
            raise
        process.begin()
        return process

    async def _create(self, spec: ContainerSpec) -> Any:
        modal, settings, memory = self._modal, spec.settings, math.ceil(spec.limits.memory_bytes / (1 << 20))
        app = await modal.App.lookup.aio(self.settings.app, create_if_missing=True)
        return await modal.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=app,
            name=spec.name,
            tags={"verl-tool-owner": owner()},
            image=modal.Image.from_registry(settings.image, add_python=self.settings.add_python),
            timeout=math.ceil(settings.max_seconds),
            idle_timeout=LEASE_SECONDS,
            cpu=(settings.cpus, settings.cpus),
            memory=(memory, memory),
            region=self.settings.region,
            block_network=True,
        )


class ModalProcess(RelayedProcess):
    """The resident, next to a first process that sleeps: output of the first one is not passed on as bytes. Its
    sandbox ends when it is idle, which is when the resident has ended."""

    def __init__(self, sandbox: Any, process: Any) -> None:
        super().__init__()
        self._sandbox, self._process = sandbox, process

    async def send(self, data: bytes) -> None:
        self._process.stdin.write(data)
        await self._process.stdin.drain.aio()

    async def watch(self) -> None:
        async def pass_on(stream: Any, reader: asyncio.StreamReader) -> None:
            async for data in stream:
                reader.feed_data(data)

        printed = asyncio.ensure_future(pass_on(self._process.stderr, self.stderr))
        try:
            await pass_on(self._process.stdout, self.stdout)
            await printed
        finally:
            printed.cancel()

    async def renew(self) -> None:
        if self.stdin.used:  # it knows frames after its first line
            self.stdin.write(_LEASE)

    async def remove(self) -> None:
        await self._sandbox.terminate.aio()
