"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from live_server import LiveServers

if TYPE_CHECKING:
    from calculator_run import Calculator

# A deadline for a single example would fail by what else the machine does; pytest's timeout holds for the whole.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes many minutes, unless asked for. Files with slow tests come first: where several processes
    take file by file, quick ones fill what is left of the time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    if os.environ.get("VERL_TOOL_E2E") == "1":
        return
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.skip(reason="takes many minutes; VERL_TOOL_E2E=1 runs it"))


@pytest.fixture
async def servers() -> AsyncIterator[LiveServers]:
    """Starts tool servers in this process; all are stopped at the end of the test."""
    running = LiveServers()
    try:
        yield running
    finally:
        if "verl_loop" in sys.modules:
            await sys.modules["verl_loop"].close_clients()
        await running.stop()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Environment variables that a test sets are not there for the next: a training started later would heed them.

    But for what `ray.init` decides once for a process: one whose core asks for tokens, and that starts a cluster which
    has none, cannot be asked by that cluster whether an actor is still held, and loses it.
    """
    before = dict(os.environ)
    yield
    decided = {name: os.environ[name] for name in ("RAY_AUTH_MODE",) if name in os.environ}
    os.environ.clear()
    os.environ.update(before | decided)
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        # Read once, at the import; `go_offline_without_hub` changes it.
        constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES


@pytest.fixture(scope="session")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Calculator:
    """Problems and a tiny model that is right about a third of the time, made once for all that train or serve it."""
    from calculator_run import prepare

    return prepare(tmp_path_factory.mktemp("calculator"))
