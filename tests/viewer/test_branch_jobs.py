"""A page goes on from a turn: the real command, with a model of random weights and a real tool server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

pytest.importorskip("verl")
pytest.importorskip("transformers")

from branch_runs import branch_run, recorded, shop_tool
from live_server import LiveServers
from pages import SIZES, complaints, fits, run, set_window, text, wait
from viewer_server import viewer

from verl_tool.agent_loop.trajectory import read_jsonl
from verl_tool.servers.tools import load_tools

TURNS = ["<shop>tea</shop>", "<shop>rice</shop>", "Result=3"]
HOSTILE = "--values $(id)\n<img src=x onerror=alert(1)> Result=4"
ORDER = {"run": "my_run", "file": "step_1", "line": 0, "turn": 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[tuple[Path, str]]:
    """A run, and the tool server of its calls."""
    running = LiveServers()
    url = (await running.start(load_tools(str(shop_tool(tmp_path, forks=True))))).url
    yield branch_run(tmp_path, [await recorded(url, TURNS)], "data.max_response_length=128"), url
    await running.stop()


@contextmanager
def asked(url: str, order: object, **headers: str) -> Iterator[http.client.HTTPResponse]:
    """The answer, whose body is still to be read."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    given = {"origin": url, "content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    body = order if isinstance(order, bytes) else json.dumps(order).encode()
    connection.request("POST", "/api/branch", body, given)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def told(url: str, order: object) -> list[dict[str, Any]]:
    """All events of an order, once it is taken: one that was left takes a moment to end."""
    deadline = time.monotonic() + 20
    while True:
        with asked(url, order) as answer:
            if answer.status == 200:
                lines = answer.read().decode().split("\n")
                break
            assert answer.status == 503
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def commands(folder: Path) -> list[psutil.Process]:
    """Those that go on from a trajectory of this run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "verl_tool.replay.branch" in line and str(folder) in line:
            found.append(process)
    return found


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.e2e
async def test_an_edited_turn_is_stored_as_the_text_that_it_is(made: tuple[Path, str]) -> None:
    folder, url = made

    def go() -> list[dict[str, Any]]:
        with viewer(folder, branch_options=[f"--tool_server_url={url}"]) as page:
            return told(page, ORDER | {"action": HOSTILE, "samples": 2})

    events = await asyncio.to_thread(go)
    said = "".join(event.get("text", "") for event in events)
    assert events[-1] == {"exit": 0}, said
    assert "step_1.1.jsonl" in said
    branches = list(read_jsonl(folder / "branches" / "step_1.1.jsonl"))
    assert [branch.extra["branch"]["text"] for branch in branches] == [HOSTILE] * 2


async def test_what_fails_is_told_with_the_command_s_words(made: tuple[Path, str]) -> None:
    folder, url = made

    def go() -> list[dict[str, Any]]:
        with viewer(folder, branch_options=[f"--tool_server_url={url}"]) as page:
            return told(page, ORDER | {"turn": 9})

    events = await asyncio.to_thread(go)
    assert events[-1] == {"exit": 2}
    assert "cannot continue" in "".join(event.get("text", "") for event in events)


async def test_one_at_a_time_and_a_page_that_leaves_ends_its_own(made: tuple[Path, str]) -> None:
    folder, url = made

    def go() -> None:
        with viewer(folder, branch_options=[f"--tool_server_url={url}"]) as page:
            with asked(page, ORDER | {"samples": 64}) as first:
                assert first.status == 200
                until(lambda: commands(folder))
                with asked(page, ORDER) as second:
                    assert (second.status, json.loads(second.read())["error"]["type"]) == (503, "overloaded")
            until(lambda: not commands(folder))
            assert not (folder / "branches").exists()
            assert told(page, ORDER | {"action": "Result=4"})[-1] == {"exit": 0}

    await asyncio.to_thread(go)


@pytest.mark.parametrize(
    ("order", "headers", "status"),
    [
        (ORDER, {"origin": "http://evil.example"}, 403),
        (ORDER, {"sec_fetch_site": "cross-site"}, 403),
        (ORDER, {"content_type": "text/plain"}, 415),
        (ORDER | {"run": "../my_run"}, {}, 404),
        (ORDER | {"file": "../../step_1"}, {}, 404),
        (ORDER | {"options": ["--model=/"]}, {}, 400),
        (ORDER | {"samples": 65}, {}, 400),
        (b"\xff", {}, 400),
        (b"[" * 100_000, {}, 400),
    ],
)
def test_what_no_page_of_the_viewer_asks_is_refused(
    tmp_path: Path, order: object, headers: dict[str, str], status: int
) -> None:
    folder = tmp_path / "my_run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "trajectories/step_1.jsonl").touch()
    with viewer(folder, branch_options=[]) as page, asked(page, order, **headers) as answer:
        assert answer.status == status
    with viewer(folder) as page, asked(page, ORDER) as answer:
        assert "--branch" in json.loads(answer.read())["error"]["message"]


def shoot(browser: Any, name: str) -> None:
    """A screenshot, if the variable of `test_static_views` asks for it."""
    if folder := os.environ.get("VERL_TOOL_SCREENSHOTS"):
        set_window(browser, *SIZES[""])
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


async def test_in_the_page(made: tuple[Path, str], browser: Any) -> None:
    """The form at a turn, the command's words, and the branch that is there then."""
    folder, url = made

    def go() -> None:
        browser.get("about:blank")
        with viewer(folder, branch_options=[f"--tool_server_url={url}"]) as page:
            browser.get(f"{page}/#/trajectory?run=my_run&file=step_1&line=0")
            wait(browser, "document.querySelectorAll('button.branch').length === 3")
            run(browser, "document.querySelectorAll('button.branch')[1].click()")
            run(browser, "const s = document.querySelector('.branching select'); s.value = 'action'; s.onchange?.()")
            run(browser, "document.querySelector('.branching select').dispatchEvent(new Event('change'))")
            assert run(browser, "return document.querySelector('.branching textarea').value") == TURNS[1]
            run(browser, "document.querySelector('.branching textarea').value = arguments[0]", HOSTILE)
            run(browser, "document.querySelector('.branching [type=submit]').click()")
            wait(browser, "document.querySelector('.job')?.dataset.state === 'done'", 120)
            assert "step_1.1.jsonl" in text(browser, ".job")
            assert text(browser, ".job .bar").startswith("stored")
            for size in SIZES.values():
                set_window(browser, *size)
                assert fits(browser)
            wait(browser, "document.querySelector('.branches a')")
            shoot(browser, "viewer_branching")
            run(browser, "document.querySelector('button.values').click()")
            wait(browser, "document.querySelectorAll('.value-bar').length === 3", 120)
            browser.get("about:blank")
        with viewer(folder) as page:  # without --branch: what is there is shown, and nothing can be added
            browser.get(f"{page}/#/trajectory?run=my_run&file=step_1&line=0")
            wait(browser, "document.querySelector('.branches a')")
            assert run(browser, "return document.querySelectorAll('button.branch').length") == 0
            browser.get("about:blank")
        assert not complaints(browser)

    await asyncio.to_thread(go)
