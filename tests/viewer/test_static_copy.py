"""A copy of runs without a server, opened from the disk by a real browser."""

from __future__ import annotations

import time

import pytest
from made_run import HOSTILE, made_run, write_tokens

from verl_tool.errors import ConfigError
from verl_tool.viewer.run_watch import RunWatch
from verl_tool.viewer.static_copy import write_copy
from verl_tool.viewer.token_texts import TokenTexts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copied")
    made_run(folder / "runs/first", steps=3)
    write_tokens(folder / "runs/first", 3)
    made_run(folder / "runs/second", steps=1)
    assert write_copy(RunWatch([folder / "runs"]), TokenTexts(), folder / "copy", 2) == 72
    return folder / "copy"


VIEWS = {
    "#/runs": "second",
    "#/run?run=first,second": "run_dir",
    "#/table?run=first&files=step_3": "24 of 48",
    "#/table?run=first&files=step_3&fault=(any)&sort=reward&desc=1": "4 of 48",
    "#/trajectory?run=first&files=step_3&file=step_3&line=4": HOSTILE[:33],
    "#/trajectory?run=first&file=step_3&line=9&tokens=1": "colour by",
    "#/group?run=first&file=step_3&line=9": "4 samples of one prompt",
    "#/time?run=first": "Where calls fail",
    "#/live": "This is a copy without a server",
}


def test_every_view_is_there_without_a_server(copy, browser):
    browser.get("about:blank")
    browser.get(f"{copy.as_uri()}/index.html")
    for address, words in VIEWS.items():
        browser.execute_script("location.hash = arguments[0]", address)
        until = time.monotonic() + 20
        while words not in browser.execute_script("return document.body.textContent"):
            assert time.monotonic() < until, (address, browser.execute_script("return document.body.innerText"))
            time.sleep(0.03)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not browser.execute_script("return window.taken")


def test_a_folder_with_something_in_it_is_refused(copy):
    with pytest.raises(ConfigError, match="is not empty"):
        write_copy(RunWatch([copy]), TokenTexts(), copy, 2)
